"""Label skew over two levels of labels, in the manner of Pachinko allocation (PAM).

Li and McCallum, "Pachinko allocation" (2006), as TensorFlow Federated's CIFAR-100 and Reddi et al.,
"Adaptive federated optimization" (2021), use it: 500 clients of 100 examples. Each client
draws shares of the coarse labels from a symmetric Dir(0.1), and within each coarse label shares of
its fine labels from a symmetric Dir(10); then its examples one by one, coarse by the first, fine
by the second, without replacement. A label that has run out is taken away, and the shares of the
others are renormalised; so is a coarse label without a fine one.

Where they are silent: when all coarse labels that a client supports have run out, its shares are
drawn again over those that are left. Clients are numbered at random.
"""

from collections.abc import Sequence

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
from fedjax_flat.data.partition.counts import by_class, deal, draw_counts
from fedjax_flat.data.partition.sizes import client_sizes
from fedjax_flat.data.sources import Dataset
from fedjax_flat.registry import entry
from fedjax_flat.settings import Setting


def pachinko(
    labels,
    coarse: Sequence[int],
    num_clients: int,
    *,
    seed: int,
    coarse_alpha: float = 0.1,
    fine_alpha: float = 10.0,
) -> Partition:
    """Two Dirichlets, over coarse and fine labels; `coarse[c]` is the superclass of class c."""
    labels, above = class_labels(labels), np.asarray(coarse)
    errors.positive("coarse_alpha", coarse_alpha)
    errors.positive("fine_alpha", fine_alpha)
    classes = np.unique(labels)
    if above.ndim != 1 or classes.min(initial=0) < 0 or classes.max(initial=-1) >= len(above):
        raise errors.UsageError(
            f"coarse labels of shape {above.shape} for classes {classes.min()} to {classes.max()}: "
            "expected the superclass of every class."
        )
    rng = np.random.default_rng(seed)
    pools = by_class(labels, rng)
    left = np.array([len(x) for x in pools])
    families = [np.flatnonzero(above[classes] == a) for a in np.unique(above[classes])]
    taken = np.zeros((num_clients, len(pools)), int)
    for k, size in enumerate(client_sizes(len(labels), num_clients, rng)):
        taken[k] = _allocate(rng, size, families, left, coarse_alpha, fine_alpha)
        left -= taken[k]
    return deal(pools, taken, rng.permutation(num_clients))


def _allocate(rng, size, families, left, coarse_alpha, fine_alpha) -> np.ndarray:
    """How many examples of each class one client takes.

    First how many of each coarse label, then within each: the same law as one after another, for
    which class an example has changes no later coarse label, except that all of one has run out.
    """
    def drawn(size, left, alpha):
        q = rng.dirichlet(np.full(len(left), alpha))
        return draw_counts(
            rng, size, q, left, lambda free: rng.dirichlet(np.full(np.count_nonzero(free), alpha))
        )

    counts = np.zeros_like(left)
    of_family = drawn(size, np.array([left[family].sum() for family in families]), coarse_alpha)
    for family, n in zip(families, of_family, strict=True):
        if n:
            counts[family] = drawn(n, left[family], fine_alpha)
    return counts


def _pachinko(dataset: Dataset, data_dir, *, clients, **options) -> Partition:
    """Label skew over coarse and fine labels, in the manner of Pachinko allocation (PAM)."""
    del data_dir
    labels = labels_of(dataset, "pachinko")
    if not dataset.coarse:
        raise errors.UsageError(
            f"partition pachinko needs the superclass of every class; {dataset.name} has none. Use "
            "a dataset with coarse labels (cifar100), or partition dirichlet."
        )
    return pachinko(labels, dataset.coarse, clients, **options)


PARTITIONS.add("pachinko", entry(_pachinko, {
    "clients": CLIENTS,
    "coarse_alpha": Setting(0.1, "concentration over the coarse labels", above=0),
    "fine_alpha": Setting(10.0, "concentration over the classes of a coarse label", above=0),
    "seed": SEED,
}))
