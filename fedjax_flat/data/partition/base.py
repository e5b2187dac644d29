"""Who owns which example: one index list per client, and the table of laws that make them.

Every example has at most one owner. A law is a pure function of labels (or owners) and a seed; its
file registers it in `PARTITIONS` with its settings.
"""

import dataclasses
import hashlib
import os

import numpy as np

from fedjax_flat import disk, errors
from fedjax_flat.data.sources import Dataset
from fedjax_flat.registry import Entry, Registry
from fedjax_flat.settings import Setting

# make(dataset, data_dir, **settings) -> Partition
PARTITIONS: Registry[Entry] = Registry("partition")
CLIENTS = Setting(20, "how many", at_least=1)
SEED = Setting(
    0, "apart from the training seed, so that seeds share their clients", at_least=0, below=2**32
)


@dataclasses.dataclass(frozen=True)
class Partition:
    """Client k owns the examples `indices[offsets[k]:offsets[k + 1]]`."""

    indices: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, lists) -> "Partition":
        """From a list of index arrays, one per client."""
        lists = [np.asarray(x) for x in lists]
        for x in lists:
            if x.size and (x.dtype.kind not in "iu" or x.min() < 0 or x.max() >= 2**31):
                raise errors.UsageError(
                    f"a partition that owns {x.flat[0]} ({x.dtype}): expected positions of "
                    "examples, whole numbers from 0."
                )
        sizes = [len(x) for x in lists]
        flat = np.concatenate([np.zeros(0, np.int64), *(np.asarray(x, np.int64) for x in lists)])
        return cls(flat.astype(np.int32), offsets_of(sizes))

    @classmethod
    def from_owners(cls, owners, num_clients: int = 0) -> "Partition":
        """From the client of each example; -1: nobody's. Clients own in the order of examples."""
        owners = np.asarray(owners)
        least = owners.min(initial=0) if owners.dtype.kind in "iu" else -2
        if owners.ndim != 1 or least < -1:
            raise errors.UsageError(
                f"owners of shape {owners.shape} and type {owners.dtype}: expected the number of "
                "a client for each example, from 0, or -1 for nobody."
            )
        owners = owners.astype(np.int64)
        sizes = np.bincount(owners[owners >= 0], minlength=num_clients)
        order = np.argsort(owners, kind="stable")[np.count_nonzero(owners < 0):]
        return cls(order.astype(np.int32), offsets_of(sizes))

    @property
    def num_clients(self) -> int:
        """K."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> np.ndarray:
        """Examples per client."""
        return np.diff(self.offsets)

    @property
    def content_hash(self) -> str:
        """SHA-256 of the index lists: two runs with the same hash have the same clients."""
        digest = hashlib.sha256(np.ascontiguousarray(self.offsets, "<i8").tobytes())
        digest.update(np.ascontiguousarray(self.indices, "<i4").tobytes())
        return digest.hexdigest()

    @property
    def client_of(self) -> np.ndarray:
        """The client of each of `indices`."""
        return np.repeat(np.arange(self.num_clients), self.sizes)

    def client(self, k: int) -> np.ndarray:
        """The indices of client k."""
        return self.indices[self.offsets[k] : self.offsets[k + 1]]

    def check(self, count: int, of: str = "example") -> None:
        """Raises unless every index is valid and owned by at most one client (or group)."""
        owner = "client" if of == "example" else "group"
        self.check_clients(owner)
        checked_offsets(self.offsets, self.indices.size)
        if self.indices.size and not 0 <= self.indices.min() <= self.indices.max() < count:
            raise errors.UsageError(
                f"partition points at {of} {self.indices.max()} of {count}; it was made for "
                "another dataset."
            )
        owned = np.zeros(count, bool)
        owned[self.indices] = True
        if np.count_nonzero(owned) < self.indices.size:
            counts = np.bincount(self.indices, minlength=count)
            raise errors.UsageError(
                f"partition gives {of} {counts.argmax()} to {counts.max()} {owner}s; expected "
                f"every {of} in at most one."
            )

    def check_clients(self, owner: str = "client") -> None:
        """Raises unless there is one."""
        if self.num_clients == 0:
            raise errors.UsageError(f"partition without a {owner}: expected one or more.")

    def where(self, keep: np.ndarray) -> "Partition":
        """The same clients with those of `indices` for which `keep` holds."""
        sizes = np.bincount(self.client_of[keep], minlength=self.num_clients)
        return Partition(self.indices[keep], offsets_of(sizes))

    def only(self, clients: np.ndarray) -> "Partition":
        """The clients for which `clients` holds, numbered anew from 0."""
        keep = np.repeat(clients, self.sizes)
        return Partition(self.indices[keep], offsets_of(self.sizes[clients]))

    def save(self, path: str | os.PathLike) -> None:
        """Writes the index lists and their hash, atomically."""
        with disk.whole(path) as partial, open(partial, "wb") as f:
            np.savez_compressed(f, indices=self.indices, offsets=self.offsets,
                                content_hash=np.array(self.content_hash))

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Partition":
        """Reads what `save` wrote and verifies its hash."""
        try:
            found = disk.read_npz(path)
            partition = cls(found["indices"], found["offsets"])
            expected = str(found["content_hash"])
        except (OSError, KeyError, ValueError) as e:
            raise errors.UsageError(f"{path} is not a saved partition ({e}).") from e
        if partition.content_hash != expected:
            raise errors.UsageError(f"{path}: content hash differs from the one saved with it.")
        return partition


def offsets_of(sizes) -> np.ndarray:
    """Where each client's list starts, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def checked_offsets(offsets: np.ndarray, count: int) -> np.ndarray:
    """`offsets` if they cut `count` positions into clients; otherwise an error that says where."""
    offsets = np.asarray(offsets)
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != count:
        ends = f"from {offsets[0]} to {offsets[-1]}" if len(offsets) else "of no client"
        raise errors.UsageError(
            f"offsets {ends} for {count} positions: expected them from 0 to {count}."
        )
    back = np.flatnonzero(offsets[1:] < offsets[:-1])
    if len(back):
        k = int(back[0])
        raise errors.UsageError(
            f"offsets fall from {offsets[k]} to {offsets[k + 1]} at client {k}: expected them in "
            "ascending order."
        )
    return offsets.astype(np.int64)


def class_labels(labels) -> np.ndarray:
    """`labels` as an array, or an error unless they are one class per example."""
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.dtype.kind not in "iub":
        raise errors.UsageError(
            f"labels of shape {labels.shape} and type {labels.dtype} are no classes: expected one "
            "whole number per example."
        )
    return labels.astype(np.int64)


def labels_of(dataset: Dataset, law: str) -> np.ndarray:
    """The classes of a dataset's train examples, for a law that needs them."""
    labels = dataset.train.labels
    if np.ndim(labels) != 1 or np.asarray(labels).dtype.kind not in "iub":
        raise errors.UsageError(
            f"partition {law} needs one class per example; {dataset.name} has labels of shape "
            f"{np.shape(labels)} and type {np.asarray(labels).dtype}. Use iid, or for places "
            "natural or proximity, or your own."
        )
    return np.asarray(labels)
