"""Every client has as much of every natural owner: FedDrive's uniform distribution.

Fani's thesis, section 5.2: each client gets equal numbers of pictures of all cities, or domains.
The shuffled examples of one owner after the other are dealt in turn, so that numbers differ by one
at most, of every owner and in all.
"""

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.partition.base import CLIENTS, PARTITIONS, SEED, Partition
from fedjax_flat.data.sources import Dataset
from fedjax_flat.registry import entry


def stratified(owners, num_clients: int, *, seed: int) -> Partition:
    """`owners[i]` is the natural owner of example i."""
    owners = np.asarray(owners)
    if not 1 <= num_clients <= len(owners):
        raise errors.UsageError(
            f"{num_clients} clients for {len(owners)} examples: expected between 1 and "
            f"{len(owners)}."
        )
    rng = np.random.default_rng(seed)
    order = np.lexsort((rng.random(len(owners)), owners))
    return Partition.of([order[k::num_clients] for k in range(num_clients)])


def _stratified(dataset: Dataset, data_dir, *, clients, seed) -> Partition:
    """Every client has as much of every natural owner (FedDrive's uniform)."""
    del data_dir
    if dataset.owners is None:
        raise errors.UsageError(
            f"partition stratified needs to know whose each example is; {dataset.name} has no "
            "owners. Use iid."
        )
    return stratified(dataset.owners, clients, seed=seed)


PARTITIONS.add("stratified", entry(_stratified, {"clients": CLIENTS, "seed": SEED}))
