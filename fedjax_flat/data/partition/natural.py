"""Clients as the data has them: writers, authors, drives, hospitals.

LEAF (Caldas et al. 2018) drops clients with few examples and has an IID twin of its FEMNIST, with
the sizes of its writers: `min_size` and `shuffled`. In turn: small clients are dropped, large ones
cut, all merged or split to a wanted number, and then the examples shuffled over the clients.
"""

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.partition.base import PARTITIONS, SEED, Partition
from fedjax_flat.data.partition.resize import resized
from fedjax_flat.data.partition.split import capped
from fedjax_flat.data.sources import Dataset
from fedjax_flat.registry import entry
from fedjax_flat.settings import Setting


def natural(
    owners,
    *,
    seed: int = 0,
    min_size: int = 0,
    max_size: int = 0,
    resize_to: int = 0,
    shuffled: bool = False,
) -> Partition:
    """`owners[i]` is the client of example i (-1: nobody's); see the module's docstring."""
    for name, value in (("max_size", max_size), ("resize_to", resize_to)):
        errors.at_least(name, value, 0)
    partition = Partition.from_owners(owners)
    partition.check_clients()
    largest = partition.sizes.max()
    partition = partition.only(partition.sizes >= min_size)
    if not partition.num_clients:
        raise errors.UsageError(
            f"min_size = {min_size} leaves no client: the largest has {largest} examples."
        )
    if max_size:
        partition = capped(partition, max_size, np.random.default_rng([seed, 2]))
    if resize_to:
        partition = resized(partition, resize_to, seed)
    if shuffled:
        order = np.random.default_rng([seed, 3]).permutation(partition.indices)
        partition = Partition(order, partition.offsets)
    return partition


def names_of(dataset: Dataset, partition: Partition) -> list[str]:
    """Of each client: the data set's, if all it has is one natural client's.

    One that has several of a city, zurich/a and zurich/b, is zurich/client 3.
    """
    found = []
    for k in range(partition.num_clients):
        index = partition.indices[partition.offsets[k] : partition.offsets[k + 1]]
        mine: list[int] = [] if dataset.owners is None else dataset.owners[index].tolist()
        owners = sorted(set(mine))
        names = [dataset.clients[o] for o in owners if 0 <= o < len(dataset.clients)]
        cities = {name.partition("/")[0] for name in names if "/" in name}
        if len(names) == len(owners) == 1:
            found.append(names[0])
        elif names and len(cities) == 1 and all("/" in name for name in names):
            found.append(f"{cities.pop()}/client {k}")
        else:
            found.append(f"client {k}")
    return found


def _natural(dataset: Dataset, data_dir, **options) -> Partition:
    """Clients as the data has them: writers, authors, drives, hospitals."""
    del data_dir
    if dataset.owners is None:
        raise errors.UsageError(
            f"partition natural needs to know whose each example is; {dataset.name} has no owners. "
            "Use a dataset with natural clients, or partition iid or dirichlet."
        )
    return natural(dataset.owners, **options)


PARTITIONS.add("natural", entry(_natural, {
    "min_size": Setting(0, "smaller clients are dropped", at_least=0),
    "max_size": Setting(0, "larger clients keep so many, at random; 0 is all", at_least=0),
    "resize_to": Setting(0, "merged or split to so many clients; 0 is as they are", at_least=0),
    "shuffled": Setting(False, "examples at random over clients of these sizes"),
    "seed": SEED,
}))
