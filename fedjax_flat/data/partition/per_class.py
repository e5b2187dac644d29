"""Label and quantity skew: every class is shared out among the clients.

Yurochkin et al., "Bayesian nonparametric federated learning of neural networks" (2019), and FedMA
(Wang et al. 2020): for each class, shares q ~ Dir(alpha) over the clients, and the class is cut at
them. Sizes differ; alpha is not comparable with that of `dirichlet`, where clients draw classes.

Options, and where they come from:

- `cap` (FedMA's and FedSeq's generators): a client that has N/K examples takes no part in the
  classes that follow; shares are renormalised over the others. The class that takes it over N/K is
  still its own, so sizes are near N/K, not equal. Classes come in random order here.
- `draws` (FedSeq: 100): of so many draws the one whose sizes deviate least.
- `min_size`: a draw that leaves a client with fewer is drawn again, a thousand times at most.
- `rounded` (Mora's unbalanced CIFAR-100: alpha = 0.1, min_size = 1): a client takes round(n_c q_k)
  of the n_c examples of class c. Where that asks for more than there are, Mora refills the class,
  and an image has two owners; here the clients that come last get what is left. Where it asks for
  fewer, the others belong to nobody, as there.
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
from fedjax_flat.data.partition.counts import by_class, deal
from fedjax_flat.data.sources import Dataset
from fedjax_flat.registry import entry
from fedjax_flat.settings import Setting

_TRIES = 1000  # draws beyond those that are kept, before min_size is given up


def per_class(
    labels,
    num_clients: int,
    *,
    alpha: float,
    seed: int,
    cap: bool = False,
    draws: int = 1,
    min_size: int = 0,
    rounded: bool = False,
) -> Partition:
    """Dir(alpha) over the clients for every class; see the module's docstring."""
    labels = class_labels(labels)
    if not 0 < alpha < np.inf:
        raise errors.UsageError(
            f"alpha = {alpha}: expected a number above 0. One class per client is partition "
            "dirichlet with alpha = 0."
        )
    errors.at_least("draws", draws, 1)
    _check_sizes(len(labels), num_clients, min_size)
    rng = np.random.default_rng(seed)
    pools = by_class(labels, rng)
    found: list[np.ndarray] = []
    for _ in range(_TRIES + draws):
        counts = _draw(rng, np.array([len(x) for x in pools]), num_clients, alpha, cap, rounded)
        if counts.sum(1).min() >= min_size:
            found.append(counts)
        if len(found) == draws:
            return deal(pools, min(found, key=lambda x: x.sum(1).std()))
    raise errors.UsageError(
        f"min_size = {min_size}: {len(found)} of {_TRIES + draws} draws with alpha = {alpha} gave "
        f"each of {num_clients} clients so many, and {draws} are needed. Lower min_size or draws, "
        "raise alpha, or take fewer clients."
    )


def _check_sizes(num_examples: int, num_clients: int, min_size: int) -> None:
    if not 1 <= num_clients <= num_examples:
        raise errors.UsageError(
            f"{num_clients} clients for {num_examples} examples: expected between 1 and "
            f"{num_examples}."
        )
    errors.at_least("min_size", min_size, 0)
    if min_size * num_clients > num_examples:
        raise errors.UsageError(
            f"min_size = {min_size} of {num_clients} clients are more than {num_examples} "
            f"examples: expected {num_examples // num_clients} or less."
        )


def _draw(rng, totals, num_clients, alpha, cap, rounded) -> np.ndarray:
    """How many examples of each class every client takes: (clients, classes)."""
    shares = rng.dirichlet(np.full(num_clients, alpha), len(totals)).T
    if not cap:
        return _cut(shares, totals, rounded)
    counts, sizes = np.zeros(shares.shape, int), np.zeros(num_clients, int)
    for c in rng.permutation(len(totals)):
        room = sizes < totals.sum() / num_clients
        q = np.where(room, shares[:, c], 0.0)
        if q.sum() == 0:
            q[room] = rng.dirichlet(np.full(np.count_nonzero(room), alpha))
        counts[:, c] = _cut(q / q.sum(), totals[c], rounded)
        sizes += counts[:, c]
    return counts


def _cut(shares, totals, rounded) -> np.ndarray:
    """Numbers of examples from the clients' shares, clients first, of the classes' totals."""
    if rounded:
        ends = np.minimum(np.cumsum(np.round(shares * totals), axis=0), totals)
    else:
        ends = np.round(np.cumsum(shares, axis=0) * totals)
        ends[-1] = totals
    numbers = ends.astype(int)
    numbers[1:] -= numbers[:-1].copy()
    return numbers


def _per_class(dataset: Dataset, data_dir, *, clients, **options) -> Partition:
    """Every class shared out among the clients by a Dirichlet, as in FedMA and FedSeq."""
    del data_dir
    return per_class(labels_of(dataset, "per_class"), clients, **options)


PARTITIONS.add("per_class", entry(_per_class, {
    "clients": CLIENTS, "alpha": Setting(0.5, "concentration over the clients", above=0),
    "cap": Setting(False, "who has N/K examples gets no more (FedMA, FedSeq)"),
    "draws": Setting(1, "keeps the draw of most equal sizes (FedSeq: 100)", at_least=1),
    "min_size": Setting(0, "a draw with a smaller client is drawn again", at_least=0),
    "rounded": Setting(False, "shares rounded one by one; some examples are nobody's (Mora)"),
    "seed": SEED,
}))
