"""Whole sequences to clients: what the laws of place recognition share.

A sequence is a natural owner, a row of pictures from one camera, and goes to one client or to
nobody. By FedVPR's rule (Caldarola 2024, section 6.3) a client is valid if it has two or more
sequences of queries and two or more of the database; where the data do not tell the two apart,
every sequence counts as both. Sequences of clients that are not valid are nobody's.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.partition.base import Partition
from fedjax_flat.data.sources import Dataset
from fedjax_flat.data.sources.places import city_of
from fedjax_flat.settings import Setting

LEAST = 2  # sequences of either role that a client needs
HELD_OUT = Setting(0, "clients held out, at random; their examples are nobody's", at_least=0)


class Sequences(NamedTuple):
    """Which sequence every example is of; of each sequence its city and its role."""

    of: np.ndarray
    city: np.ndarray  # names
    query: np.ndarray
    database: np.ndarray

    def valid(self, members: np.ndarray) -> bool:
        """Whether these sequences make a client."""
        return min(self.query[members].sum(), self.database[members].sum()) >= LEAST


def sequences_of(dataset: Dataset, law: str) -> Sequences:
    """The sequences of a data set whose natural clients they are."""
    if dataset.owners is None or not dataset.clients:
        raise errors.UsageError(
            f"partition {law} gives whole sequences to clients; {dataset.name} has no owners. Use "
            "a data set of places (`fedjax-flat datasets`), or partition iid."
        )
    count = len(dataset.clients)
    query = database = np.ones(count, bool)
    if dataset.queries is not None:
        number = np.bincount(dataset.owners, minlength=count)
        asked = np.bincount(dataset.owners[dataset.queries], minlength=count)
        query, database = asked > 0, asked < number
    city = np.array([city_of(name) for name in dataset.clients])
    return Sequences(np.asarray(dataset.owners), city, query, database)


def positions_of(dataset: Dataset, law: str) -> np.ndarray:
    """Where train examples were taken, for a law that needs it."""
    labels = np.asarray(dataset.train.labels)
    if labels.ndim != 2 or labels.shape[1] != 2 or labels.dtype.kind != "f":
        raise errors.UsageError(
            f"partition {law} needs a position of every example, in metres; {dataset.name} has "
            f"labels of shape {labels.shape} and type {labels.dtype}. Use natural, clustering or "
            "random_places, which need none."
        )
    return labels.astype(np.float64)


def clients_of(
    found: Sequences, groups: Sequence[np.ndarray], *, held_out: int = 0, seed: int = 0,
    hint: str = "",
) -> Partition:
    """Groups of sequences as clients, in this order; without those held out."""
    if not groups:
        raise errors.UsageError(
            f"no client has {LEAST} sequences of queries and {LEAST} of the database. {hint}"
        )
    if held_out >= len(groups):
        raise errors.UsageError(
            f"validation_clients = {held_out} of {len(groups)} clients: expected fewer, some to "
            "train on."
        )
    away = np.random.default_rng([seed, 8]).permutation(len(groups))[:held_out]
    kept = np.delete(np.arange(len(groups)), away)
    client = np.full(len(found.city), -1)
    for k, group in enumerate(kept.tolist()):
        client[groups[group]] = k
    return Partition.from_owners(client[found.of], len(kept))
