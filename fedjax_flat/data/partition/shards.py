"""Label skew by number: every client holds a few shards of single labels.

McMahan et al., "Communication-efficient learning of deep networks from decentralized data" (2017):
examples sorted by label are cut into `clients * shards_per_client` shards of equal size, dealt at
random. A client may get two shards of one label, and a shard has two labels where its cut does not
fall on a border.

`distinct`: every client has exactly `shards_per_client` labels (Li et al. 2022, "#C = k"). Labels
are cut into shards in proportion to their size, each into equal ones, and no client gets two of
one label; so sizes differ where labels' sizes do.
"""

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.partition.base import (
    CLIENTS,
    PARTITIONS,
    SEED,
    Partition,
    class_labels,
    labels_of,
)
from fedjax_flat.data.partition.counts import apportion, by_class, deal
from fedjax_flat.data.sources import Dataset
from fedjax_flat.registry import entry
from fedjax_flat.settings import Setting


def shards(
    labels, num_clients: int, *, shards_per_client: int, seed: int, distinct: bool = False
) -> Partition:
    """`shards_per_client` shards for each client; see the module's docstring."""
    labels = class_labels(labels)
    errors.at_least("shards_per_client", shards_per_client, 1)
    errors.at_least("num_clients", num_clients, 1)
    total = num_clients * shards_per_client
    if total > len(labels):
        raise errors.UsageError(
            f"{num_clients} clients of {shards_per_client} shards for {len(labels)} examples: "
            f"expected at most one shard for each."
        )
    rng = np.random.default_rng(seed)
    pools = by_class(labels, rng)
    if distinct:
        return _distinct(pools, num_clients, shards_per_client, rng)
    sizes = np.diff(np.linspace(0, len(labels), total + 1).round().astype(int))
    owner = np.repeat(rng.permutation(total) // shards_per_client, sizes)
    owners = np.empty(len(labels), int)
    owners[np.concatenate(pools)] = owner
    return Partition.from_owners(owners, num_clients)


def _distinct(pools, num_clients, per_client, rng) -> Partition:
    total = num_clients * per_client
    if not len(pools) / num_clients <= per_client <= len(pools):
        raise errors.UsageError(
            f"{num_clients} clients of {per_client} different labels, and there are {len(pools)} "
            f"labels: expected every label with somebody, and shards_per_client at most "
            f"{len(pools)}."
        )
    shards_of = apportion([len(x) for x in pools], total, low=1, high=num_clients)
    left = shards_of.copy()
    has = np.zeros((num_clients, len(pools)), bool)
    for k in range(num_clients):
        # The labels with most shards left, at random among equals: nobody is left with two of one.
        has[k, np.lexsort((rng.random(len(left)), -left))[:per_client]] = True
        left -= has[k]
    turn = np.cumsum(has, axis=0) - 1
    totals = np.array([len(x) for x in pools])
    counts = np.where(has, totals // shards_of + (turn < totals % shards_of), 0)
    return deal(pools, counts, rng.permutation(num_clients))


def _shards(dataset: Dataset, data_dir, *, clients, **options) -> Partition:
    """A few shards of single labels for each client, as in McMahan et al. 2017."""
    del data_dir
    return shards(labels_of(dataset, "shards"), clients, **options)


PARTITIONS.add("shards", entry(_shards, {
    "clients": CLIENTS,
    "shards_per_client": Setting(2, "how many each client gets", at_least=1),
    "distinct": Setting(False, "of as many different labels"),
    "seed": SEED,
}))
