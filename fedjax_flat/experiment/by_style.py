"""Clients in clusters by style, and test images that are given to the cluster nearest in style.

See algorithms/ladd.py. A test image's style is that of its own window, as it is stored; where
images are restyled, it takes on the mean style of its cluster. A model of all clients, and any
model where there is one cluster, is evaluated on all images as they are.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from fedjax_flat import data as data_lib
from fedjax_flat import errors
from fedjax_flat.data import Dataset, Examples, Partition, geometry, spectra, styles
from fedjax_flat.experiment import usage
from fedjax_flat.groups import by_style
from fedjax_flat.models import Clusters

BLOCK = 50  # images at once


class StyleClusters(NamedTuple):
    """The cluster of every client; `centres` () where there is one."""

    of_client: np.ndarray
    centres: Any
    scores: dict[int, float]  # mean silhouettes of the numbers that were tried
    sent: int  # bytes, by all clients together
    low: spectra.Window | None
    restyle: bool

    @property
    def number(self) -> int:
        """How many clusters there are."""
        return int(self.of_client.max()) + 1


def build_clusters(
    config: ml_collections.ConfigDict, dataset: Dataset, partition: Partition,
    shift: data_lib.Shift | None,
) -> StyleClusters | None:
    """The clusters of a method that has some."""
    method = usage.method_of(config)
    if not method.styles:
        return None
    own = config.algorithm[method.section]
    if own.clusters == 1:
        return StyleClusters(np.zeros(partition.num_clients, np.int32), (), {}, 0, None, False)
    bank = styles.bank(style_of_clients(own, dataset), dataset, partition, shift)
    sent, there = np.asarray(bank.styles), np.asarray(bank.counts) > 0
    labels, scores = by_style.clusters_of(
        sent, _numbers(own, len(sent)), starts=own.starts, kept=own.kept
    )
    of_client = np.zeros(partition.num_clients, np.int32)
    of_client[there] = labels
    height, width = dataset.input_shape[:2]
    low = spectra.square(height, width, own.window)
    centres = by_style.centroids(sent, labels).astype(np.float32)
    return StyleClusters(of_client, centres, scores, bank.bytes, low, own.restyle)


def style_of_clients(own: Any, dataset: Dataset) -> styles.Style:
    """What clients send for clusters, with a method's settings."""
    return styles.fda(
        dataset, window=own.window, strength=(1.0, 1.0), images="all", donors="all"
    )


def _numbers(own: Any, clients: int) -> list[int]:
    """The numbers of clusters that are tried."""
    if own.clusters:
        return [own.clusters]
    found = list(range(own.least, min(own.most, clients - 1) + 1))
    if not found:
        raise errors.UsageError(
            f"algorithm.ladd.least = {own.least} and most = {own.most} clusters of {clients} "
            f"clients: expected 2 <= least <= most, and least below {clients}."
        )
    return found


def by_nearest(
    found: StyleClusters, dataset: Dataset, evaluate: Callable[..., Any],
    predict: Callable[..., jax.Array],
) -> tuple[Callable[..., Any], Callable[..., jax.Array]]:
    """`evaluate` and `predict`, which give an image to the model of its cluster, if there are."""
    kept: dict[int, Any] = {}

    def shares(examples: Examples) -> list[tuple[np.ndarray, Examples]]:
        if id(examples.labels) not in kept:
            kept[id(examples.labels)] = examples, _shares(found, dataset, examples)
        return kept[id(examples.labels)][1]

    def model(variables, s):
        return jax.tree.map(lambda x: x[s], variables.models)

    def evaluate_each(variables, examples):
        if not isinstance(variables, Clusters):
            return evaluate(variables, examples)
        sums = [
            evaluate(model(variables, s), own)
            for s, (where, own) in enumerate(shares(examples)) if len(where)
        ]
        return jax.tree.map(lambda *parts: sum(parts[1:], start=parts[0]), *sums)

    def predict_each(variables, examples, positions):
        if not isinstance(variables, Clusters):
            return predict(variables, examples, positions)
        rows: dict[int, Any] = {}
        for s, (where, own) in enumerate(shares(examples)):
            mine = np.flatnonzero(np.isin(where, positions))
            if len(mine):
                logits = predict(model(variables, s), own, mine)
                rows |= dict(zip(where[mine].tolist(), logits, strict=True))
        return jnp.stack([rows[int(i)] for i in positions])

    return evaluate_each, predict_each


def _shares(
    found: StyleClusters, dataset: Dataset, examples: Examples
) -> list[tuple[np.ndarray, Examples]]:
    """For every cluster, positions of the images that are nearest, and these examples."""
    low = found.low
    assert low
    of = jax.jit(jax.vmap(lambda image: spectra.amplitudes(image, low)))

    def put(image, style):
        new = spectra.restyled(image, style, low, jnp.float32(1))
        return geometry.stored_as(new, image, dataset.max_value)

    become = jax.jit(jax.vmap(put, in_axes=(0, None)))
    images = np.asarray(examples.inputs)
    blocks = lambda x: [x[i : i + BLOCK] for i in range(0, len(x), BLOCK)]
    which = by_style.nearest(
        np.concatenate([np.asarray(of(block)) for block in blocks(images)]), found.centres
    )
    shares = []
    for s, centre in enumerate(found.centres):
        where = np.flatnonzero(which == s)
        own = images[where]
        if found.restyle and len(where):
            own = np.concatenate([np.asarray(become(block, centre)) for block in blocks(own)])
        share = Examples(own, np.asarray(examples.labels)[where])
        shares.append((where, jax.tree.map(jax.device_put, share)))
    return shares
