"""The groups of a config: what is known of its clients, and who is with whom in which round.

Estimates take a training of every client, so they are kept on disk under the name of a SHA-256 of
everything that decides them; groups are made from them in seconds, whenever they are needed.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import os
import pathlib
from typing import Any

import jax
import ml_collections
import numpy as np

from fedjax_flat import data as data_lib
from fedjax_flat import groups as groups_lib
from fedjax_flat import models, parts, progress, rng
from fedjax_flat.algorithms.fedseq2par import growth, stages
from fedjax_flat.client import local_training
from fedjax_flat.data import Dataset, Examples, FederatedData, HostData, Partition
from fedjax_flat.data.federated import rows_of
from fedjax_flat.data.sources import files
from fedjax_flat.experiment import config as config_lib
from fedjax_flat.experiment import usage
from fedjax_flat.experiment.features import inputs_digest
from fedjax_flat.experiment.method import build_client_optimizer
from fedjax_flat.groups.estimators import Estimate, public_set
from fedjax_flat.tasks import TASKS, Task

logger = logging.getLogger("fedjax_flat")
CLIENTS_AT_ONCE = 20  # that are estimated between two signs of life


@dataclasses.dataclass(frozen=True)
class Grouping:
    """Who is with whom: counts[i] groups from round starts[i] on, rounds from 0; 0: by limits."""

    sizes: np.ndarray  # examples of the clients
    starts: np.ndarray
    counts: np.ndarray
    options: dict[str, Any]  # of groups.build
    limits: groups_lib.Limits
    estimates: np.ndarray | None
    test_left: np.ndarray | None = None  # test examples that are not in a public set

    @functools.lru_cache(maxsize=4)  # noqa: B019 (one per experiment)
    def stage(self, i: int) -> Partition:
        """The groups of a stage."""
        limits = self.limits._replace(groups=int(self.counts[i]))
        return groups_lib.build(
            self.options["name"], self.sizes, limits, estimates=self.estimates,
            **{n: v for n, v in self.options.items() if n != "name"},
        )

    def at(self, round: int) -> Partition:
        """The groups of a round."""
        return self.stage(int(np.searchsorted(self.starts, round, side="right")) - 1)

    def rows(self, round: int) -> np.ndarray:
        """The groups of a round, in an array whose shape is the same in all rounds."""
        count = max(int(self.counts.max()), self.stage(0).num_clients)
        shape = count, int(self.stage(0).sizes.max())
        return rows_of(self.at(round), len(self.sizes), shape)

    def next_change(self, round: int) -> int | None:
        """The first round after this one that has other groups."""
        later = self.starts[self.starts > round]
        return int(later[0]) if len(later) else None

    @property
    def members(self) -> int:
        """How many groups there are at most."""
        return self.rows(0).shape[0]

    @property
    def content_hash(self) -> str:
        """Of the first groups, and of the estimates that later ones are made from."""
        digest = hashlib.sha256(self.stage(0).content_hash.encode())
        if self.estimates is not None:
            digest.update(np.ascontiguousarray(self.estimates).tobytes())
        return digest.hexdigest()

    def __hash__(self) -> int:
        return id(self)


def build_grouping(
    config: ml_collections.ConfigDict, dataset: Dataset, partition: Partition, task: Task,
    data: FederatedData | HostData, data_dir: str | os.PathLike | None = None,
) -> Grouping | None:
    """The groups, or clusters, that `config.groups` describes; None where there are none."""
    if usage.members_of(config) not in ("groups", "clusters"):
        return None
    own, sizes = config.groups, partition.sizes
    limits = groups_lib.Limits(own.examples, own.clients, usage.group_count(config))
    starts, counts = np.zeros(1, np.int32), np.array([limits.groups], np.int32)
    if usage.grows(config):
        grown = config.algorithm.fedseq2par
        law = growth(grown.growth, config.rounds, alpha=grown.alpha, beta=grown.beta,
                     rounding=grown.rounding)
        starts, counts = stages(law, len(sizes))
        limits = limits._replace(groups=int(counts[0]))
    limits.check(sizes)  # before anybody trains for estimates
    estimates, left = build_estimates(config, dataset, partition, task, data, data_dir)
    options = {
        "name": own.name, "distance": own.metric, "start": own.start, "seed": own.seed,
        "clusters": own.clusters or dataset.num_classes or 1,
    }
    made = Grouping(sizes, starts, counts, options, limits, estimates, left)
    first = made.stage(0)
    logger.info(
        "groups: %d of %d to %d clients, %s to %s examples%s", first.num_clients,
        first.sizes.min(), first.sizes.max(), *_examples(first, sizes),
        f", {counts[-1]} in the end" if len(counts) > 1 else "",
    )
    return made


def _examples(groups: Partition, sizes: np.ndarray) -> tuple[int, int]:
    each = np.add.reduceat(sizes[groups.indices], groups.offsets[:-1])
    return int(each.min()), int(each.max())


def build_estimates(
    config: ml_collections.ConfigDict, dataset: Dataset, partition: Partition, task: Task,
    data: FederatedData | HostData, data_dir: str | os.PathLike | None = None,
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """(one row per client, which test examples are left to evaluate if a public set took some)."""
    own, name = config.groups, usage.estimator_of(config)
    if name == "none":
        return None, None
    if name == "names":
        clusters = [text.partition("/")[0] for text in data_lib.names_of(dataset, partition)]
        return np.unique(clusters, return_inverse=True)[1].reshape(-1, 1).astype(float), None
    if name == "labels":
        counts = data_lib.class_counts(partition, dataset.train.labels, dataset.num_classes)
        if own.name == "oracle":
            return counts.astype(float), None
        return counts / np.maximum(counts.sum(axis=1, keepdims=True), 1), None
    public, left = None, None
    if name == "conf":
        public, left = public_set(dataset, own.public, partition.indices, own.seed)
    known = _facts(config, dataset, partition)
    key = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:24]
    beside = data_lib.data_folder(data_dir) or pathlib.Path.home() / ".cache"
    path = files.cache_folder(beside) / f"estimates-{key}.npy"
    if path.exists():
        rows = np.load(path)
    else:
        logger.info("estimates of %d clients are made once, and kept in %s",
                    partition.num_clients, path)
        rows = _of_all(estimator(config, dataset, task, public), data)
        with files.written_whole(path) as partial, open(partial, "wb") as f:
            np.save(f, rows)
    return (groups_lib.reduced(rows, own.variance) if name == "clf" else rows), left


def estimator(
    config: ml_collections.ConfigDict, dataset: Dataset, task: Task, public: Examples | None
) -> Estimate:
    """What `config.groups.estimator` names, of the config's model, or of its probe."""
    own, key = config.groups, jax.random.key(config.seed)
    client = functools.partial(
        local_training, optimizer=build_client_optimizer(config),
        batch_size=config.client.batch_size, epochs=own.epochs,
    )
    if own.estimator == "task2vec":
        task = probe_task(config, dataset) if own.probe or own.weights else task
        worker = client(task, frozen=lambda name: not parts.head(name))
    else:
        worker = client(task)
    variables = jax.jit(task.init)(rng.fold(key, "init"))
    probe = groups_lib.Probe(worker, variables, rng.fold(key, "groups"))
    if own.estimator == "clf":
        return groups_lib.classifiers(probe)
    if own.estimator == "task2vec":
        return groups_lib.task2vec(probe)
    assert public is not None
    return groups_lib.confidences(probe, public, dataset.num_classes, own.reading)


def probe_task(config: ml_collections.ConfigDict, dataset: Dataset) -> Task:
    """Classification by the probe network of `config.groups`."""
    preprocess = data_lib.preprocess(dataset, mean=config.data.mean, std=config.data.std)
    options = {"pretrained": config.groups.weights} if config.groups.weights else {}
    model = models.build(
        config.groups.probe or config.model.name, num_classes=dataset.num_classes,
        inputs=preprocess.inputs, frozen_stats=True, **options,
    )
    found = TASKS.find("classification")
    settings = {name: setting.default for name, setting in found.settings.items()}
    return found.make(model, preprocess, dataset, **settings)


def _of_all(estimate: Estimate, data: FederatedData | HostData) -> np.ndarray:
    count, found = data.num_clients, []
    block = min(count, CLIENTS_AT_ONCE)
    for start in progress.bar(range(0, count, block), what="estimates"):
        chosen = np.full(block, -1, np.int32)
        here = np.arange(start, min(start + block, count))
        chosen[: len(here)] = here
        own = data if isinstance(data, FederatedData) else data.of(here)
        found.append(np.asarray(estimate(own, jax.device_put(chosen)))[: len(here)])
    return np.concatenate(found)


def _facts(config: ml_collections.ConfigDict, dataset: Dataset, partition: Partition) -> dict:
    """All that decides estimates."""
    used = config_lib.used(config)
    matters: tuple[str, ...] = (
        "data.", "model.", "task.", "client.", "groups.estimator", "groups.epochs",
        "groups.public", "groups.reading", "groups.probe", "groups.weights",
    )
    if usage.estimator_of(config) == "conf":
        matters += ("groups.seed",)
    return {
        "settings": {n: v for n, v in used.items() if n == "seed" or n.startswith(matters)},
        "partition": partition.content_hash,
        "inputs": inputs_digest(dataset.train.inputs),
    }
