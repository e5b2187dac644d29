"""Class imbalance for labels of pixels: FedDrive's Algorithm 8 (Fani's thesis, section 5.2).

With D^c the images in which class c appears, and S_k the sizes that clients are to have,

    for client k:
        while |D_k| < S_k:
            c* = argmin_c |D^c|  over the classes with an image left
            E  = min(S_k - |D_k|, |D^c*|) images of D^c* at random
            D_k <- D_k and E;   D^c <- D^c without E, for all c

so the first clients have all the images of the rarest classes. As printed, c* is chosen once for a
client, before the loop, which never ends when D^c* has fewer than S_k images; here it is chosen
anew at each turn. Images without any class are in no D^c, and go to the clients that no class can
fill any more (the released lists leave some images out).

Sizes are equal, or skewed as elsewhere, or those that `natural` clients of this number have: the
thesis takes the sizes of its heterogeneous clients.
"""

from collections.abc import Sequence

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.partition.base import CLIENTS, PARTITIONS, SEED, Partition
from fedjax_flat.data.partition.natural import natural
from fedjax_flat.data.partition.sizes import SIZES, client_sizes
from fedjax_flat.data.sources import Dataset
from fedjax_flat.registry import entry
from fedjax_flat.settings import Setting


def rare_classes(has: np.ndarray, sizes: Sequence[int], *, seed: int) -> Partition:
    """`has[i, c]`: whether class c appears in image i; `sizes`: of the clients."""
    if sum(sizes) > len(has):
        raise errors.UsageError(
            f"clients of {sum(sizes)} images in all, and there are {len(has)}: expected at most "
            "as many."
        )
    rng = np.random.default_rng(seed)
    left, clients = np.ones(len(has), bool), []
    for size in sizes:
        own: list[int] = []
        while len(own) < size:
            pool = _rarest(has, left)
            drawn = rng.choice(pool, min(size - len(own), len(pool)), replace=False)
            own += drawn.tolist()
            left[drawn] = False
        clients.append(np.array(own, np.int64))
    return Partition.of(clients)


def _rarest(has: np.ndarray, left: np.ndarray) -> np.ndarray:
    """What is left of the images with the class that fewest of them have; of all, if none has."""
    counts = has[left].sum(0)
    if not counts.any():
        return np.flatnonzero(left)
    rarest = np.argmin(np.where(counts > 0, counts, len(has) + 1))
    return np.flatnonzero(left & has[:, rarest])


def classes_in(labels, num_classes: int) -> np.ndarray:
    """(images, classes): which classes appear in each image's labels."""
    labels = np.asarray(labels)
    has = np.zeros((len(labels), num_classes), bool)
    for row, image in zip(has, labels, strict=True):
        found = np.unique(image)
        row[found[(found >= 0) & (found < num_classes)]] = True
    return has


def _rare_classes(
    dataset: Dataset, data_dir, *, clients, natural_sizes, seed, **sizes
) -> Partition:
    """The first clients have the images of the rarest classes (FedDrive's class imbalance)."""
    del data_dir
    labels = dataset.train.labels
    if dataset.task != "segmentation":
        raise errors.UsageError(
            f"partition rare_classes needs labels of pixels; {dataset.name} is for "
            f"{dataset.task}. Use per_class or dirichlet."
        )
    if not natural_sizes:
        rng = np.random.default_rng([seed, 1])
        wanted = client_sizes(len(labels), clients, rng, **sizes)
    elif dataset.owners is None:
        raise errors.UsageError(
            f"partition.natural_sizes: {dataset.name} has no natural clients. Leave it out."
        )
    else:
        wanted = natural(dataset.owners, seed=seed, resize_to=clients).sizes
    return rare_classes(classes_in(labels, dataset.num_classes), wanted.tolist(), seed=seed)


PARTITIONS.add("rare_classes", entry(_rare_classes, {
    "clients": CLIENTS,
    "natural_sizes": Setting(False, "sizes of so many natural clients, instead of equal ones"),
    **SIZES, "seed": SEED,
}))
