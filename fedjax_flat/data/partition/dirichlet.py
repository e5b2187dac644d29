"""Label skew: every client draws its own shares of the classes.

Hsu, Qi and Brown, "Measuring the effects of non-identical data distribution for federated visual
classification" (2019): client k draws q_k ~ Dir(alpha * p), p the class prior of the whole set, and
then its examples by q_k, without replacement. Two ways from q_k to numbers of examples:

- `drawn`: one by one, class from q_k. A class that has run out leaves q_k, which is renormalised.
- `rounded`: n q_k, each rounded to the nearest. What is missing then, by rounding or as a class
  cannot give it, is shared out by a new q; what is too much is taken off the largest.

`rounded` is the nearest, of some twenty laws that were tried on them, to the splits released with
FedSAM, whose files have the names of those of Hsu et al. (2020). CIFAR-100, over 40 seeds:

| alpha | | released | rounded | drawn |
|---|---|---|---|---|
| 1000 | classes per client, least and mean | 42, 98.8 | 43, 98.6 +- 0.1 | 29, 95.8 +- 0.2 |
| 1000 | variance of counts | 3.46 | 3.43 +- 0.13 | 9.33 +- 0.23 |
| 0.5 | classes per client, mean | 5.13 | 5.11 +- 0.19 | 3.89 +- 0.15 |
| 0.5 | counts of one to four | 152 | 137 +- 12 | 74 +- 9 |
| 0.5 | variance of counts | 1521 | 1379 +- 70 | 1481 +- 51 |

So the last row is two deviations off. So are CIFAR-10's at alpha = 0.5 (least explained: clients of
one class, 2 against 8 +- 3) and 10; its alpha = 5 has unequal sizes and comes from elsewhere.
Released clients stand in the order in which they drew: the left-overs are the last ones'.

Where the paper is silent: when every class that q_k supports has run out, q_k is drawn again over
the classes that are left; clients are numbered at random, so that the left-overs of nearly
exhausted classes fall on no fixed client. alpha = 0 is the limit, one class per client: clients are
dealt to classes in proportion to the prior, and each class is shared evenly among its clients, so
client sizes are equal exactly when the classes are.
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
from fedjax_flat.data.partition.counts import apportion, by_class, deal, draw_counts, over
from fedjax_flat.data.partition.sizes import SIZES, client_sizes
from fedjax_flat.data.sources import Dataset
from fedjax_flat.registry import entry
from fedjax_flat.settings import Setting


def dirichlet(
    labels,
    num_clients: int,
    *,
    alpha: float,
    seed: int,
    counts: str = "drawn",
    size_sigma: float = 0.0,
    size_alpha: float = 0.0,
) -> Partition:
    """Label skew of strength `alpha` as in Hsu et al.; see the module's docstring."""
    if not 0 <= alpha < np.inf:
        raise errors.UsageError(
            f"alpha = {alpha}: a Dirichlet concentration cannot be negative or infinite. Use 0 for "
            "one class per client, large values (100, 1000) for nearly identical clients, and "
            "partition iid for identical ones."
        )
    rule = errors.lookup("counts", counts, {"drawn": _drawn, "rounded": _rounded})
    rng = np.random.default_rng(seed)
    labels = class_labels(labels)
    pools = by_class(labels, rng)
    if alpha == 0:
        for name, value in (("size_sigma", size_sigma), ("size_alpha", size_alpha)):
            if value:
                raise errors.UsageError(f"alpha = 0 fixes client sizes; {name} must be 0 with it.")
        if counts != "drawn":
            raise errors.UsageError("alpha = 0 leaves nothing to round; leave counts out with it.")
        return _one_class_per_client(pools, num_clients, rng)

    sizes = client_sizes(
        len(labels), num_clients, rng, size_sigma=size_sigma, size_alpha=size_alpha
    )
    left = np.array([len(x) for x in pools])
    prior = left / left.sum()
    taken = np.zeros((num_clients, len(pools)), int)
    for k, size in enumerate(sizes):
        taken[k] = rule(rng, size, alpha * prior, left)
        left -= taken[k]
    return deal(pools, taken, rng.permutation(num_clients))


def _drawn(rng, size, concentration, left) -> np.ndarray:
    """How many examples of each class one client takes, drawn one by one."""
    return draw_counts(
        rng, size, rng.dirichlet(concentration), left,
        lambda available: rng.dirichlet(concentration[available]),
    )


def _rounded(rng, size, concentration, left) -> np.ndarray:
    """How many examples of each class one client takes, shares rounded."""
    counts = np.zeros_like(left)
    while (missing := size - counts.sum()) > 0:
        q = over(
            rng.dirichlet(concentration), left - counts,
            lambda available: rng.dirichlet(concentration[available]),
        )
        counts += np.minimum(_nearest(q, missing), left - counts)
    return counts


def _nearest(q, total) -> np.ndarray:
    """Shares of `total`, each rounded; less of the largest where that is too many in all."""
    q = q / q.max()  # a sum of numbers near the smallest float has few digits
    counts = np.round(q / q.sum() * total).astype(int)
    while counts.sum() > total:
        counts[counts.argmax()] -= 1
    return counts if counts.any() else apportion(q, total)


def _one_class_per_client(pools, num_clients, rng) -> Partition:
    if num_clients < len(pools):
        raise errors.UsageError(
            f"alpha = 0 gives each client one class, so {len(pools)} classes need at least "
            f"{len(pools)} clients; {num_clients} were asked for."
        )
    clients_of = apportion([len(x) for x in pools], num_clients, low=1)
    parts = [p for x, n in zip(pools, clients_of, strict=True) for p in np.array_split(x, n)]
    return Partition.of([parts[i] for i in rng.permutation(num_clients)])


def _dirichlet(dataset: Dataset, data_dir, *, clients, **options) -> Partition:
    """Label skew as in Hsu et al. 2019."""
    del data_dir
    return dirichlet(labels_of(dataset, "dirichlet"), clients, **options)


PARTITIONS.add("dirichlet", entry(_dirichlet, {
    "clients": CLIENTS, "alpha": Setting(0.5, "0 is one class per client", at_least=0),
    "counts": Setting("drawn", "rounded is the law of the released splits",
                      choices=("drawn", "rounded")),
    **SIZES, "seed": SEED,
}))
