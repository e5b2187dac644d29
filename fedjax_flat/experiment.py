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
from fedjax_flat.algorithms import ALGORITHMS, Algorithm
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
    make_algorithm = errors.lookup("algorithm", config.algorithm.name, ALGORITHMS)

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
    algorithm = make_algorithm(
        build_client(config, objective),
        build_server_optimizer(config.server),
        weighting=config.algorithm.weighting,
    )
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


def build_client(config: ml_collections.ConfigDict, objective: Objective):
    """Local training as `config.client` says, at the rates of SWA's cycle if there is one."""
    client = config.client
    optimizer = sgd(
        build_rate(config),
        momentum=client.momentum,
        weight_decay=client.weight_decay,
        gradient=build_sharpness(client),
    )
    return local_training(
        objective,
        optimizer,
        batch_size=client.batch_size,
        epochs=client.epochs,
        steps=client.steps or None,
    )


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


def build_sharpness(config: ml_collections.ConfigDict) -> tuple:
    """The transforms before weight decay, from `config.client`."""
    rho = config.rho
    if config.rho_warmup:
        rho = warm_up(config.rho_start, config.rho, config.rho_warmup)
    make = errors.lookup(
        "client sharpness",
        config.sharpness,
        {
            "none": lambda: (),
            "sam": lambda: (sam(rho),),
            "asam": lambda: (asam(rho, config.eta, scale=config.asam_scale),),
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


def build_server_optimizer(config: ml_collections.ConfigDict):
    """The optax optimiser that `config.server` names."""
    make = errors.lookup("server optimizer", config.optimizer, server.OPTIMIZERS)
    if config.optimizer == "sgd":
        return make(config.learning_rate, momentum=config.momentum or None)
    if config.momentum:
        raise errors.UsageError(
            f"server.momentum = {config.momentum} goes with server.optimizer = 'sgd', not "
            f"{config.optimizer!r}."
        )
    return make(config.learning_rate)


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
