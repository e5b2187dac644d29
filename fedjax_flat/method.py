"""The method of a config: what clients do, what the server does, and whether that goes together."""

import math

import jax.numpy as jnp
import ml_collections

from fedjax_flat import config as config_lib
from fedjax_flat import errors, server
from fedjax_flat.algorithms import Algorithm
from fedjax_flat.algorithms.registry import METHODS, Method, Parts
from fedjax_flat.client import asam, local_training, sam, sgd, warm_up
from fedjax_flat.engine.round import Averages
from fedjax_flat.objective import Objective


def build_algorithm(config: ml_collections.ConfigDict, objective: Objective) -> Algorithm:
    """The method that `config.algorithm` names, of the parts that the rest of it describes."""
    method = METHODS[config.algorithm.name]
    client = config.client
    rate = build_rate(config)
    worker = local_training(
        objective,
        sgd(rate, momentum=client.momentum, weight_decay=client.weight_decay, clip=client.clip),
        sharpness=build_sharpness(client, method),
        batch_size=client.batch_size,
        epochs=client.epochs,
        steps=client.steps or None,
    )
    optimizer = build_server_optimizer(config.server, method)
    return method.make(Parts(worker, optimizer, rate, build_rho(client), config))


def check_combination(config: ml_collections.ConfigDict) -> None:
    """Refuses what a method cannot be combined with, and says why."""
    name, client, server_ = config.algorithm.name, config.client, config.server
    method = errors.lookup("algorithm", name, METHODS)

    def refuse(setting, value, why):
        raise errors.UsageError(f"{setting} = {value} does not go with {name}: {why}")

    if method.sharpness == "own" and client.sharpness != "none":
        refuse("client.sharpness", client.sharpness, "it has an ascent of its own, of radius "
               "client.rho. Leave client.sharpness at none.")
    if method.sharpness == "no steps":
        for setting, value, nothing in (
            ("client.sharpness", client.sharpness, "none"), ("data.mixup", config.data.mixup, 0),
            ("data.cutout", config.data.cutout, 0), ("data.flip", config.data.flip, False),
            ("data.crop_padding", config.data.crop_padding, 0),
            ("client.momentum", client.momentum, 0), ("client.clip", client.clip, 0),
            ("client.weight_decay", client.weight_decay, 0),
        ):
            if value != nothing:
                refuse(setting, value, "clients send one gradient over their examples as they are "
                       "and take no steps.")
    default = config_lib.default_config().server
    if method.optimizer == "own":
        for setting in ("optimizer", "learning_rate", "momentum"):
            if server_[setting] != default[setting]:
                refuse(f"server.{setting}", server_[setting], "its server step is part of the "
                       "method. Leave it at the default.")
    elif method.optimizer in server.ADAPTIVE and server_.optimizer not in ("sgd", method.optimizer):
        refuse("server.optimizer", server_.optimizer, f"the name means {method.optimizer}.")
    elif method.optimizer == "sgd with momentum" and server_.optimizer != "sgd":
        refuse("server.optimizer", server_.optimizer, "the name means SGD with momentum.")
    if name in ("mime", "mimelite") and client.momentum:
        refuse("client.momentum", client.momentum, "its momentum is algorithm.mime.momentum.")


def build_rate(config: ml_collections.ConfigDict):
    """The client learning rate: a number, or a function of the round."""
    rate, factors = config.client.learning_rate, []
    if config.client.learning_rate_decay != 1:
        decay = jnp.float32(config.client.learning_rate_decay)
        factors.append(lambda t: decay ** t.astype(jnp.float32))
    if "swa" in config_lib.averages(config):
        swa = config.server.swa
        start = config_lib.swa_start(config)
        factors.append(server.swa_cycle(start, swa.cycle, swa.rate_ratio, capture=swa.capture))
    return (lambda t: rate * math.prod(f(t) for f in factors)) if factors else rate


def build_rho(config: ml_collections.ConfigDict):
    """The clients' radius: a number, or a function of the round while it warms up."""
    if config.rho_warmup:
        return warm_up(config.rho_start, config.rho, config.rho_warmup)
    return config.rho


def build_sharpness(config: ml_collections.ConfigDict, method: Method):
    """The sharpness transform of `config.client`; a method that is named for SAM has SAM."""
    name = config.sharpness
    if name == "none" and method.sharpness == "sam":
        name = "sam"
    rho = build_rho(config)
    make = errors.lookup(
        "client sharpness",
        name,
        {
            "none": lambda: None,
            "sam": lambda: sam(rho),
            "asam": lambda: asam(rho, config.eta, scale=config.asam_scale),
        },
    )
    return make()


def build_averages(config: ml_collections.ConfigDict) -> Averages:
    """The averages that `config.server.average` names."""
    swa, wima = config.server.swa, config.server.wima

    def make_swa():
        start = config_lib.swa_start(config)
        average = server.swa(start, swa.cycle, capture=swa.capture)
        if average.first > config.rounds:
            raise errors.UsageError(
                f"SWA would average its first model in round {average.first} (server.swa.start = "
                f"{swa.start:g}, cycle = {swa.cycle}), after the last of {config.rounds} rounds. "
                "Start earlier, shorten the cycle, or raise rounds."
            )
        return average

    make = {"swa": make_swa, "wima": lambda: server.wima(wima.window, parameters=wima.parameters)}
    names = [n for n in config_lib.averages(config) if n != "swa" or swa.averaging]
    return {name: make[name]() for name in names}


def build_server_optimizer(config: ml_collections.ConfigDict, method: Method):
    """The server optimiser: the method's, if it is named for one, else `config.server`'s."""
    kind = method.optimizer if method.optimizer in server.ADAPTIVE else config.optimizer
    errors.lookup("server optimizer", kind, dict.fromkeys(("sgd", *server.ADAPTIVE)))
    if kind == "sgd":
        momentum = config.momentum
        if method.optimizer == "sgd with momentum":
            momentum = momentum or 0.9
        return server.sgd(config.learning_rate, momentum)
    if config.momentum:
        raise errors.UsageError(
            f"server.momentum = {config.momentum} goes with server.optimizer = 'sgd', not {kind!r}."
        )
    return server.adaptive(kind, **config.adaptive)
