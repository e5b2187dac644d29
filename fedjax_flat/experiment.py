"""From a config to the pure functions and arrays it describes."""

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from fedjax_flat import config as config_lib
from fedjax_flat import data as data_lib
from fedjax_flat import errors, models, rng, server
from fedjax_flat.algorithms import Algorithm
from fedjax_flat.algorithms.registry import METHODS, Method, Parts
from fedjax_flat.client import asam, local_training, sam, sgd, warm_up
from fedjax_flat.data import Dataset, Examples, FederatedData, Partition
from fedjax_flat.engine import cohort, sampling
from fedjax_flat.engine.evaluate import evaluator
from fedjax_flat.engine.round import Averages, RoundStep, TrainState, init_state, round_step
from fedjax_flat.engine.round import models as models_of
from fedjax_flat.objective import Objective, Totals, classification


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything a training loop needs; `data` and `splits` are on the device."""

    config: ml_collections.ConfigDict
    partition: Partition
    data: FederatedData
    splits: dict[str, Examples]
    model: models.Model
    objective: Objective
    algorithm: Algorithm
    averages: Averages
    over: cohort.CohortMap
    step: RoundStep
    evaluate: Callable[..., Totals]

    def init(self) -> TrainState:
        """The state before the first round; only the seed decides it."""
        key = jax.random.key(self.config.seed)
        params = jax.jit(self.model.init)(rng.fold(key, "init"))
        return init_state(self.algorithm, params, self.data.num_clients, key, self.averages)

    def models(self, state: TrainState) -> dict[str, Any]:
        """The trained and the averaged models by name."""
        return models_of(self.algorithm, state, self.averages)


def build(
    config: ml_collections.ConfigDict, data_dir: str | os.PathLike | None = None
) -> Experiment:
    """Validates `config` and builds the experiment it describes."""
    config_lib.validate(config)
    errors.lookup("model", config.model.name, models.MODELS)
    method = errors.lookup("algorithm", config.algorithm.name, METHODS)
    check_combination(config, method)

    dataset = data_lib.load(config.data.name, data_dir)
    partition = build_partition(config.partition, dataset, data_dir)
    sample = errors.lookup("cohort sampling", config.cohort.sampling, sampling.SAMPLERS)(
        partition.num_clients, config.cohort.size
    )
    model = models.build(
        config.model.name,
        num_classes=dataset.num_classes,
        image_shape=dataset.image_shape,
        precision=config.model.precision,
    )
    preprocess = data_lib.preprocess(
        dataset,
        crop_padding=config.data.crop_padding,
        flip=config.data.flip,
        cutout=config.data.cutout,
        mixup=config.data.mixup,
    )
    objective = classification(model, preprocess)
    algorithm = build_algorithm(config, objective)
    averages = build_averages(config)
    strategy = "map" if config.debug else config.cohort.strategy  # one client's values at a time
    over = cohort.cohort_map(strategy, chunk=config.cohort.chunk, devices=config.cohort.devices)
    batches = over if over.mesh else cohort.cohort_map("map")
    data = over.replicate(data_lib.federate(dataset.train, partition))
    held = {"train": data.examples}
    return Experiment(
        config=config,
        partition=partition,
        data=data,
        splits={
            name: held.get(name) or over.replicate(data_lib.on_device(dataset.split(name)))
            for name in config.eval.splits
        },
        model=model,
        objective=objective,
        algorithm=algorithm,
        averages=averages,
        over=over,
        step=round_step(algorithm, sample, over, averages),
        evaluate=jax.jit(evaluator(objective, config.eval.batch_size, batches)),
    )


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


def check_combination(config: ml_collections.ConfigDict, method: Method) -> None:
    """Refuses what a method cannot be combined with, and says why."""
    name, client, server_ = config.algorithm.name, config.client, config.server

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


def build_partition(
    config: ml_collections.ConfigDict, dataset: Dataset, data_dir=None
) -> Partition:
    """The clients that `config.partition` describes."""
    labels = dataset.train.labels

    def from_release():
        folder = data_dir or os.environ.get(data_lib.DATA_VARIABLE, ".")
        path = config.file or os.path.join(folder, "fedsam-splits.npz")
        return data_lib.released(path, config.split)

    options = {"seed": config.seed, "size_sigma": config.size_sigma}
    make = errors.lookup(
        "partition",
        config.name,
        {
            "iid": lambda: data_lib.iid(labels, config.clients, **options),
            "dirichlet": lambda: data_lib.dirichlet(
                labels, config.clients, alpha=config.alpha, **options
            ),
            "released": from_release,
        },
    )
    return make()
