"""Examples that stay on the host, in memory or in a file: a round brings its cohort's along.

`HostData.of(clients)` is the `FederatedData` of these clients alone, on the device. Shapes depend
only on how many clients are asked for (there is room for the largest ones), so that every cohort
uses one executable; sizes, order and padding are those of `federate`, and so are all bits.
"""

import dataclasses
import functools
import mmap
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
    groups: np.ndarray | None = None  # these and passes: as in FederatedData
    passes: int = 1
    clusters: np.ndarray | None = None
    shift: Any = None
    unlabelled: Any = None  # on the device, as in FederatedData
    labelled: Examples | None = None  # on the device, as in FederatedData
    classes: Any = None  # as in FederatedData
    bank: Any = None  # on the device, as in FederatedData

    def __post_init__(self):
        self.partition.check(count_of(self.examples))
        for x in jax.tree.leaves(self.examples):
            _expect_random_access(x)

    @property
    def num_clients(self) -> int:
        """K: the number of clients, or of groups."""
        return self.partition.num_clients if self.groups is None else len(self.groups)

    # What all clients have to be looked at for, once.

    @functools.cached_property
    def _sizes(self) -> np.ndarray:
        return self.partition.sizes

    @functools.cached_property
    def _range(self) -> tuple[int, int]:
        return int(self._sizes.min()), int(self._sizes.max())

    @functools.cached_property
    def _up_to(self) -> np.ndarray:
        return np.cumsum(np.sort(self._sizes)[::-1])

    def _largest(self, count: int) -> int:
        """How many examples the `count` largest clients have together."""
        return int(self._up_to[min(count, len(self._up_to)) - 1])

    def of(self, members: np.ndarray) -> FederatedData:
        """The examples of these clients (or groups), on the device."""
        members = np.asarray(members)
        wanted = members if self.groups is None else self.groups[members].ravel()
        clients = np.unique(wanted[wanted >= 0])
        slots, sizes = len(wanted), self._sizes
        room = max(self._largest(slots), 1)
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
            max_size=self._range[1],
            equal_sizes=self._range[0] == self._range[1],
            groups=None if self.groups is None else jax.device_put(self.groups),
            passes=self.passes,
            clusters=None if self.clusters is None else jax.device_put(self.clusters),
            shift=self.shift,
            present=jax.device_put(padded(clients, NOBODY)),
            unlabelled=self.unlabelled,
            labelled=self.labelled,
            classes=None if self.classes is None else jax.device_put(self.classes),
            bank=self.bank,
        )


def _expect_random_access(x: Any) -> None:
    """Of a memory-mapped file: reading ahead would fetch many times what a client has."""
    while x is not None and not isinstance(x, mmap.mmap):
        x = getattr(x, "base", None)
    if x is not None and hasattr(mmap, "MADV_RANDOM"):
        x.madvise(mmap.MADV_RANDOM)


def _rows(x: np.ndarray, index: np.ndarray, capacity: int) -> np.ndarray:
    """x[index] in an array with room for `capacity` rows."""
    # Without memmap's bookkeeping; indexing, because np.take copies what is not contiguous whole.
    rows = narrow(np.asarray(x)[index])
    if len(rows) == capacity:
        return rows
    padded = np.zeros((capacity, *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    return padded
