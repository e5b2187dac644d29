"""What the papers print beside a split: sizes, classes per client, how alike clients are.

The mean Jaccard index is that of Fani's thesis (chapter 3): over all K^2 pairs of clients, each
with itself too, how many classes both have of those that either has. 1: all have the same classes;
1/K: no two share any.
"""

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.partition.base import Partition, class_labels

_BLOCK = 2048  # clients whose pairs are in memory at a time


def class_counts(partition: Partition, labels, num_classes: int) -> np.ndarray:
    """How many examples of each class every client has: (clients, classes)."""
    own = class_labels(labels)[partition.indices].astype(np.int64)
    if own.size and not 0 <= own.min() <= own.max() < num_classes:
        raise errors.UsageError(
            f"labels {own.min()} to {own.max()} of {num_classes} classes: expected 0 to "
            f"{num_classes - 1}."
        )
    cells = np.bincount(
        partition.client_of * num_classes + own, minlength=partition.num_clients * num_classes
    )
    return cells.reshape(partition.num_clients, num_classes)


def mean_jaccard(partition: Partition, labels) -> float:
    """Mean over all pairs of clients of |C_k and C_h| / |C_k or C_h|; alike where both are empty.

    Clients with the same classes are counted once, with their number; pairs go by blocks.
    """
    partition.check_clients()
    classes, label = np.unique(class_labels(labels), return_inverse=True)
    has = np.zeros((partition.num_clients, len(classes)), bool)
    has[partition.client_of, label[partition.indices]] = True
    _, first, times = np.unique(
        np.packbits(has, axis=1), axis=0, return_index=True, return_counts=True
    )
    has = has[first]
    number = has.sum(1).astype(np.float32)
    total = 0.0
    starts = range(0, len(has), _BLOCK)
    for i in starts:
        rows = has[i : i + _BLOCK].astype(np.float32)
        for j in (j for j in starts if j >= i):
            both = rows @ has[j : j + _BLOCK].astype(np.float32).T
            either = number[i : i + _BLOCK, None] + number[None, j : j + _BLOCK] - both
            index = np.where(either > 0, both / np.maximum(either, 1), np.float32(1))
            pairs = times[i : i + _BLOCK] @ index.astype(np.float64) @ times[j : j + _BLOCK]
            total += float(pairs) * (1 if i == j else 2)
    return float(total / partition.num_clients**2)


def statistics(partition: Partition, labels, *, jaccard: bool = True) -> dict[str, float]:
    """Sizes, classes per client, share of the clients that have a class, and the Jaccard index.

    The last takes K^2 pairs: leave it out (`jaccard=False`) beyond some ten thousand clients.
    """
    partition.check_clients()
    classes, label = np.unique(class_labels(labels), return_inverse=True)
    # One number for each (client, class) that occurs: room for a million clients.
    cells = np.unique(partition.client_of * len(classes) + label[partition.indices])
    per_client = np.bincount(cells // len(classes), minlength=partition.num_clients)
    reach = np.bincount(cells % len(classes), minlength=len(classes)) / partition.num_clients
    found = {
        "clients": partition.num_clients,
        "examples": int(partition.sizes.sum()),
        "min_size": int(partition.sizes.min()),
        "mean_size": float(partition.sizes.mean()),
        "std_size": float(partition.sizes.std()),
        "max_size": int(partition.sizes.max()),
        "min_classes": int(per_client.min()),
        "mean_classes": float(per_client.mean()),
        "max_classes": int(per_client.max()),
        "min_clients_of_class": float(reach.min()),
        "mean_clients_of_class": float(reach.mean()),
        "max_clients_of_class": float(reach.max()),
    }
    return {**found, "mean_jaccard": mean_jaccard(partition, labels)} if jaccard else found
