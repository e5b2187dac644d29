"""Clients by place: all sequences around a query picture (FedVPR; Caldarola 2024, section 6.3).

In every city, a picture is drawn among the queries whose sequence nobody has, and all sequences
within `radius` metres of it that nobody has become a client, if it is valid (sequences.py). Then
the next is drawn, until every query picture was drawn or is somebody's. 1000, 2000 and 4000 m make
1303, 713 and 316 clients of Mapillary SLS, and 12 clients are held out for validation.

Left open there, and so here: a sequence is within the radius if any of its pictures is; after a
draw that makes no valid client its sequences stay free for others.
"""

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.partition.base import PARTITIONS, SEED, Partition
from fedjax_flat.data.partition.sequences import (
    HELD_OUT,
    Sequences,
    clients_of,
    positions_of,
    sequences_of,
)
from fedjax_flat.data.sources import Dataset
from fedjax_flat.registry import entry
from fedjax_flat.settings import Setting


def proximity(
    found: Sequences, positions, queries, *, radius: float, seed: int, validation_clients: int = 0
) -> Partition:
    """`positions` in metres of every example, and whether it is one of the `queries`."""
    if not 0 < radius < np.inf:
        raise errors.UsageError(f"radius = {radius}: expected a number of metres above 0.")
    positions, taken = np.asarray(positions, np.float64), np.zeros(len(found.city), bool)
    groups = []
    for c, city in enumerate(np.unique(found.city)):
        here = np.flatnonzero(found.city[found.of] == city)
        rng = np.random.default_rng([seed, 7, c])
        for centre in rng.permutation(here[queries[here]]):
            if taken[found.of[centre]]:
                continue
            squares = np.sum((positions[here] - positions[centre]) ** 2, axis=1)
            near = np.unique(found.of[here[squares <= radius**2]])
            near = near[~taken[near]]
            if found.valid(near):
                taken[near] = True
                groups.append(near)
    return clients_of(
        found, groups, held_out=validation_clients, seed=seed, hint=f"Raise radius = {radius:g}."
    )


def _proximity(dataset: Dataset, data_dir, *, radius, validation_clients, seed) -> Partition:
    """All sequences around a place, by a radius in metres (FedVPR)."""
    del data_dir
    positions = positions_of(dataset, "proximity")
    found = sequences_of(dataset, "proximity")
    queries = np.ones(len(positions), bool) if dataset.queries is None else dataset.queries
    return proximity(found, positions, queries, radius=radius, seed=seed,
                     validation_clients=validation_clients)


PARTITIONS.add("proximity", entry(_proximity, {
    "radius": Setting(2000.0, "in metres; FedVPR has 1000, 2000 and 4000", above=0),
    "validation_clients": HELD_OUT,
    "seed": SEED,
}))
