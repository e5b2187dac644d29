"""Examples that stay on the host, in memory or in a file: a round brings its cohort's along.

`HostData.of(clients)` is the `FederatedData` of these clients alone, on the device. Shapes depend
only on how many clients are asked for (there is room for the largest ones), so that every cohort
uses one executable; sizes, order and padding are those of `federate`, and so are all bits.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from fedjax_flat.data.federated import FederatedData, narrow
from fedjax_flat.data.partition import Partition
from fedjax_flat.data.sources import Examples, count_of

NOBODY = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class HostData:
    """All clients' examples, as arrays or memory-mapped files, and who owns them."""

    examples: Examples
    partition: Partition
    groups: np.ndarray | None = None  # as in FederatedData
    shift: Any = None

    def __post_init__(self):
        self.partition.check(count_of(self.examples))

    @property
    def num_clients(self) -> int:
        """K: the number of clients, or of groups."""
        return self.partition.num_clients if self.groups is None else len(self.groups)

    def of(self, members: np.ndarray) -> FederatedData:
        """The examples of these clients (or groups), on the device."""
        members = np.asarray(members)
        wanted = members if self.groups is None else self.groups[members].ravel()
        clients = np.unique(wanted[wanted >= 0])
        slots = len(wanted)
        sizes = self.partition.sizes
        capacity = int(np.sort(sizes)[-slots:].sum()) if slots < len(sizes) else int(sizes.sum())
        room = max(capacity, 1)
        offsets = self.partition.offsets
        own = [np.arange(offsets[k], offsets[k + 1]) for k in clients]
        where = np.concatenate([np.zeros(0, np.int64), *own])
        index = self.partition.indices[where]
        padded = lambda values, fill: np.concatenate(
            [values, np.full(slots - len(clients), fill)]
        ).astype(np.int32)
        ends = np.cumsum(sizes[clients])
        taken = lambda x: _rows(x, index, room)
        return FederatedData(
            examples=jax.tree.map(lambda x: jax.device_put(taken(x)), self.examples),
            indices=jax.device_put(_rows(self.partition.indices, where, room)),
            offsets=jax.device_put(padded(ends - sizes[clients], 0)),
            sizes=jax.device_put(padded(sizes[clients], 0)),
            max_size=int(sizes.max()),
            equal_sizes=bool(sizes.min() == sizes.max()),
            groups=None if self.groups is None else jax.device_put(self.groups),
            shift=self.shift,
            present=jax.device_put(padded(clients, NOBODY)),
        )


def _rows(x: np.ndarray, index: np.ndarray, capacity: int) -> np.ndarray:
    """x[index] in an array with room for `capacity` rows."""
    # Without memmap's bookkeeping; indexing, because np.take copies what is not contiguous whole.
    rows = narrow(np.asarray(x)[index])
    if len(rows) == capacity:
        return rows
    padded = np.zeros((capacity, *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    return padded
