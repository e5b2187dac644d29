"""From how many examples of each class a client has to which ones; every example once."""

from collections.abc import Callable, Sequence

import numpy as np

from fedjax_flat.data.partition.base import Partition, offsets_of


def by_class(labels: np.ndarray, rng) -> list[np.ndarray]:
    """The examples of each class that occurs, shuffled."""
    return [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]


def deal(pools: Sequence[np.ndarray], counts: np.ndarray, order=None) -> Partition:
    """Row k of `counts` (clients, classes) takes the next `counts[k, c]` of every `pools[c]`.

    With `order`, client j of the result is row `order[j]`.
    """
    rows, classes = counts.shape
    order = np.arange(rows) if order is None else order
    number = np.empty(rows, int)
    number[order] = np.arange(rows)
    taken = np.concatenate([p[:n] for p, n in zip(pools, counts.sum(0), strict=True)])
    client = np.repeat(np.tile(number, classes), counts.T.ravel())
    indices = taken[np.argsort(client, kind="stable")]
    return Partition(indices.astype(np.int32), offsets_of(counts.sum(1)[order]))


def draw_counts(
    rng, size: int, q: np.ndarray, left: np.ndarray, again: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Of each class, how many of `size` examples drawn one by one from `q` without replacement.

    Drawing `size` classes at once and drawing again, from the renormalised q, whatever a class
    could not give has the same law as drawing one example after another. `again` draws a q over
    the classes that are left when q has none of them.
    """
    counts = np.zeros_like(left)
    while (missing := size - counts.sum()) > 0:
        q = over(q, left - counts, again)
        counts += np.minimum(rng.multinomial(missing, q / q.sum()), left - counts)
    return counts


def over(q: np.ndarray, available: np.ndarray, again) -> np.ndarray:
    """q without the classes that have run out; drawn again over the others if nothing remains."""
    q = np.where(available > 0, q, 0.0)
    if q.sum() == 0:
        q = np.zeros_like(q)
        q[available > 0] = again(available > 0)
    return q


def apportion(weights, total: int, *, low: int = 0, high: int | None = None) -> np.ndarray:
    """Whole numbers that sum to `total`, in proportion to `weights`, by largest remainder.

    Each is at least `low` and at most `high`; the caller sees to it that such numbers exist.
    """
    share = np.asarray(weights, float)
    share = share / share.max()  # a sum of numbers near the smallest float has few digits
    share *= total / share.sum()
    counts = np.clip(np.floor(share).astype(int), low, high)
    while counts.sum() != total:
        step = 1 if counts.sum() < total else -1
        free = counts < (total if high is None else high) if step > 0 else counts > low
        gap = np.where(free, step * (share - counts), -np.inf)
        best = np.argsort(-gap, kind="stable")[: min(abs(total - counts.sum()), free.sum())]
        counts[best] += step
    return counts
