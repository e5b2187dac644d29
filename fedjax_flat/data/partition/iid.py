"""Every client sees the class prior: shuffled and dealt."""

import numpy as np

from fedjax_flat.data.partition.base import CLIENTS, PARTITIONS, SEED, Partition, offsets_of
from fedjax_flat.data.partition.sizes import SIZES, client_sizes
from fedjax_flat.data.sources import Dataset
from fedjax_flat.registry import entry


def iid(
    labels, num_clients: int, *, seed: int, size_sigma: float = 0.0, size_alpha: float = 0.0
) -> Partition:
    """Shuffled and dealt: every client sees the class prior."""
    rng = np.random.default_rng(seed)
    sizes = client_sizes(
        len(labels), num_clients, rng, size_sigma=size_sigma, size_alpha=size_alpha
    )
    return Partition(rng.permutation(len(labels)).astype(np.int32), offsets_of(sizes))


def _iid(dataset: Dataset, data_dir, *, clients, seed, **sizes) -> Partition:
    """Every client sees the class prior."""
    del data_dir
    return iid(dataset.train.labels, clients, seed=seed, **sizes)


PARTITIONS.add("iid", entry(_iid, {"clients": CLIENTS, **SIZES, "seed": SEED}))
