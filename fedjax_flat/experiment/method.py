"""The method of a config: what clients do, what the server does, what travels."""

import math

import jax.numpy as jnp
import ml_collections

from fedjax_flat import errors, parts, server
from fedjax_flat.algorithms import Algorithm, Parts, added, compressed, personal, without_traffic
from fedjax_flat.client import asam, local_training, sam, sgd, warm_up
from fedjax_flat.client.optimizer import named
from fedjax_flat.engine.round import Averages
from fedjax_flat.experiment import usage
from fedjax_flat.tasks import Task
from fedjax_flat.wire import CODECS


def build_algorithm(config: ml_collections.ConfigDict, task: Task) -> Algorithm:
    """The method that `config.algorithm` names, of the parts that the rest of it describes."""
    (method, additions), client = usage.methods_of(config), config.client
    frozen = parts.named(client.frozen)
    worker = local_training(
        task,
        build_client_optimizer(config),
        sharpness=build_sharpness(config),
        batch_size=client.batch_size,
        epochs=client.epochs,
        steps=client.steps or None,
        frozen=frozen,
    )
    settings_of = lambda m: {name: config.algorithm[m.section][name] for name in m.settings}

    def make(worker):
        assert method.make  # of the one that others are added to
        return method.make(Parts(
            worker, build_server_optimizer(config), build_rate(config), build_rho(client),
            config.algorithm.weighting, settings_of(method), config,
        ))

    algorithm = added(make, worker, *(m.add(settings_of(m)) for m in additions if m.add))
    algorithm = without_traffic(algorithm, frozen)
    if config.model.statistics == "own":
        algorithm = personal(algorithm, parts.statistics)
    up, down = (
        CODECS.find(name).make() if name != "none" else None
        for name in (config.wire.up, config.wire.down)
    )
    return compressed(algorithm, up=up, down=down) if up or down else algorithm


def build_client_optimizer(config: ml_collections.ConfigDict):
    """The optimiser of `config.client`."""
    client, rate = config.client, build_rate(config)
    shared = {"weight_decay": client.weight_decay, "clip": client.clip}
    if client.optimizer == "sgd":
        return sgd(rate, momentum=client.momentum, nesterov=client.nesterov, **shared)
    return named(client.optimizer, rate, client.options, **shared)


def build_rate(config: ml_collections.ConfigDict):
    """The client learning rate: a number, or a function of the round."""
    rate, factors = config.client.learning_rate, []
    if config.client.learning_rate_decay != 1:
        decay = jnp.float32(config.client.learning_rate_decay)
        factors.append(lambda t: decay ** t.astype(jnp.float32))
    if "swa" in usage.averages(config):
        swa = config.server.swa
        start = usage.swa_start(config)
        factors.append(server.swa_cycle(start, swa.cycle, swa.rate_ratio, capture=swa.capture))
    return (lambda t: rate * math.prod(f(t) for f in factors)) if factors else rate


def build_rho(config: ml_collections.ConfigDict):
    """The clients' radius: a number, or a function of the round while it warms up."""
    if config.rho_warmup:
        return warm_up(config.rho_start, config.rho, config.rho_warmup)
    return config.rho


def build_sharpness(config: ml_collections.ConfigDict):
    """The sharpness transform of the clients; a method that is named for SAM has SAM."""
    client, rho = config.client, build_rho(config.client)
    make = {
        "none": lambda: None,
        "sam": lambda: sam(rho),
        "asam": lambda: asam(rho, client.eta, scale=client.asam_scale),
    }
    return make[usage.sharpness_of(config)]()


def build_averages(config: ml_collections.ConfigDict) -> Averages:
    """The models that are averaged beside the trained one."""
    swa, wima = config.server.swa, config.server.wima

    def make_swa():
        start = usage.swa_start(config)
        average = server.swa(start, swa.cycle, capture=swa.capture)
        if average.first > config.rounds:
            raise errors.UsageError(
                f"SWA would average its first model in round {average.first} (server.swa.start = "
                f"{swa.start:g}, cycle = {swa.cycle}), after the last of {config.rounds} rounds. "
                "Start earlier, shorten the cycle, or raise rounds."
            )
        return average

    make = {"swa": make_swa, "wima": lambda: server.wima(wima.window, parameters=wima.parameters)}
    names = [n for n in usage.averages(config) if n != "swa" or swa.averaging]
    return {name: make[name]() for name in names}


def build_server_optimizer(config: ml_collections.ConfigDict):
    """The server optimiser: the method's, if it is named for one, else `config.server`'s."""
    kind = usage.server_optimizer_of(config)
    if kind in server.ADAPTIVE:
        return server.adaptive(kind, **config.server.adaptive)
    return server.sgd(config.server.learning_rate, usage.server_momentum(config))
