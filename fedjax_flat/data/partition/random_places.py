"""Clients with sequences of every city, at random (FedVPR's Random; Caldarola 2024, section 6.3).

The shuffled sequences of one city after the other are dealt in turn, so that numbers differ by one
at most, of every city and in all. There, a city with fewer sequences than clients gives some of
them twice; here every example has one owner, and such a city reaches as many clients as it has
sequences.
"""

import numpy as np

from fedjax_flat.data.partition.base import CLIENTS, PARTITIONS, SEED, Partition
from fedjax_flat.data.partition.sequences import HELD_OUT, Sequences, clients_of, sequences_of
from fedjax_flat.data.partition.stratified import stratified
from fedjax_flat.data.sources import Dataset
from fedjax_flat.registry import entry


def random_places(
    found: Sequences, num_clients: int, *, seed: int, validation_clients: int = 0
) -> Partition:
    """Every client has as many sequences of every city as any other, give or take one."""
    dealt = stratified(found.city, num_clients, seed=seed)
    groups = [np.sort(dealt.client(k)) for k in range(num_clients)]
    return clients_of(found, groups, held_out=validation_clients, seed=seed)


def _random_places(dataset: Dataset, data_dir, *, clients, validation_clients, seed) -> Partition:
    """Whole sequences at random, some of every city (FedVPR)."""
    del data_dir
    return random_places(sequences_of(dataset, "random_places"), clients, seed=seed,
                         validation_clients=validation_clients)


PARTITIONS.add("random_places", entry(_random_places, {
    "clients": CLIENTS, "validation_clients": HELD_OUT, "seed": SEED,
}))
