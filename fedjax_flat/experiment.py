"""From a config to the pure functions and arrays it describes."""

import dataclasses
import logging
import os
from collections.abc import Callable
from typing import Any

import jax
import ml_collections

from fedjax_flat import config as config_lib
from fedjax_flat import data as data_lib
from fedjax_flat import errors, memory, method, models, rng
from fedjax_flat.algorithms import Algorithm
from fedjax_flat.data import Dataset, Examples, FederatedData, Partition
from fedjax_flat.engine import client_state, cohort, sampling
from fedjax_flat.engine.evaluate import evaluator
from fedjax_flat.engine.round import (
    Averages,
    RoundStep,
    TrainState,
    init_state,
    local_models,
    round_step,
)
from fedjax_flat.engine.round import models as models_of
from fedjax_flat.objective import Objective, Totals, classification

logger = logging.getLogger("fedjax_flat")


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
    client_state_in: str
    over: cohort.CohortMap
    step: RoundStep
    evaluate: Callable[..., Totals]
    local_models: Callable[..., Any]  # see engine.round.local_models

    def init(self) -> TrainState:
        """The state before the first round; only the seed decides it."""
        key = jax.random.key(self.config.seed)
        params = jax.jit(self.model.init)(rng.fold(key, "init"))
        return init_state(
            self.algorithm, params, self.data.num_clients, key, self.averages, self.client_state_in
        )

    def models(self, state: TrainState) -> dict[str, Any]:
        """The trained and the averaged models by name."""
        return models_of(self.algorithm, state, self.averages)


def build(
    config: ml_collections.ConfigDict, data_dir: str | os.PathLike | None = None
) -> Experiment:
    """Validates `config` and builds the experiment it describes."""
    config_lib.validate(config)
    errors.lookup("model", config.model.name, models.MODELS)
    method.check_combination(config)

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
    algorithm = method.build_algorithm(config, objective)
    averages = method.build_averages(config)
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
        client_state_in=place_client_state(config, model, algorithm, partition.num_clients),
        over=over,
        step=round_step(algorithm, sample, over, averages),
        evaluate=jax.jit(evaluator(objective, config.eval.batch_size, batches)),
        local_models=jax.jit(local_models(algorithm, over)),
    )


def place_client_state(config, model: models.Model, algorithm: Algorithm, clients: int) -> str:
    """Where the clients' state is kept: what `config.cohort.client_state` says, if it fits."""
    init = lambda key: algorithm.init(model.init(key), clients)[1]
    row = jax.eval_shape(init, jax.random.key(0))
    where = client_state.choose(
        config.cohort.client_state, row, clients, memory.free()
    )
    if jax.tree.leaves(row):
        size = memory.gigabytes(clients * client_state.row_bytes(row))
        logger.info("client state: %s for %d clients, in %s memory", size, clients, where)
    return where


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
