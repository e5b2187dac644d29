"""Which clients train in sequence: groups that are as alike as their clients are different.

Caldarola et al. (ICPR 2022) and Caldarola 2024, section 5.2: as many groups as possible with
|D_S| >= D_min and K_S <= K_S,max. A group is closed once it has D_min examples or K_S,max clients,
and the next begins; a last one with fewer than D_min examples is dissolved, and its clients go to
the groups with room, fewest examples first, in turns (the released code).

    random    clients in random order
    kmeans    K-means of the estimates, clusters as many as classes; clusters give one client each
              in turn, and the turn goes on from group to group
    greedy    the first client is drawn, then always the one farthest from the mean of the group
              (metrics.py). `released`: nobody is drawn, the first is the one farthest from the
              uniform vector, means weigh clients by their examples, and if no distance is above 0
              the first client that is left joins
    icg       FedGSP's inter-cluster grouping (Zeng et al., "Heterogeneous federated learning via
              grouped sequential-to-parallel training", 2022): with M groups, L = K // M clusters of
              M alike, of which every group gets one client. The document does not spell it out.
              Here clusters are K-means with equal sizes: a client goes to the nearest centre that
              has room, those that are nearest to it first; very many clients are first halved
              along their principal direction. The K - L M clients that FedGSP leaves out are
              redistributed
    oracle    from the labels, which nobody has in practice: always the client that brings the
              group's label counts closest to those of all. An upper bound
    names     clusters as the data name them: clients CLUSTER/CLIENT, of a city say (FedVPR), whose
              numbers are the estimates

With `groups` given, they are that many, of K // groups clients or one more, and D_min does not
count. D_min = 0 leaves K_S,max alone to close a group. All is NumPy; 40,000 clients take seconds.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import threadpoolctl

from fedjax_flat import errors
from fedjax_flat.data.partition import Partition
from fedjax_flat.groups import metrics
from fedjax_flat.groups.metrics import Metric, metric

Pick = Callable[[list[int]], int]  # who joins the group next
MANY = 5000  # clients, from which on distances are single precision
AT_ONCE = 20_000_000  # distances between clients and centres, held at a time


class Limits(NamedTuple):
    """When a group is closed."""

    examples: int = 0  # D_min; 0: K_S,max alone decides
    clients: int = 11  # K_S,max
    groups: int = 0  # how many; 0: as many as there will be

    def check(self, sizes: np.ndarray) -> None:
        """Refuses what no grouping of these clients can keep."""
        total, clients = int(sizes.sum()), len(sizes)
        if self.groups > clients:
            raise errors.UsageError(
                f"{self.groups} groups of {clients} clients: expected at most {clients}."
            )
        if self.groups:
            return
        if self.clients < 1:
            raise errors.UsageError(
                f"groups.clients = {self.clients}: expected 1 or more clients in a group."
            )
        if self.examples > total:
            raise errors.UsageError(
                f"groups.examples = {self.examples}: expected at most {total}, which all clients "
                "have together."
            )
        most = int(np.sort(sizes)[-self.clients :].sum())
        if self.examples > most:
            raise errors.UsageError(
                f"groups.examples = {self.examples} with groups.clients = {self.clients}: the "
                f"{self.clients} largest clients have {most} together. Lower the first or raise "
                "the second."
            )


def random(sizes: np.ndarray, limits: Limits, *, seed: int) -> list[list[int]]:
    """Clients in random order."""
    order = iter(_order(sizes, seed).tolist())
    return fill(lambda group: next(order), sizes, limits)


def kmeans(
    estimates: np.ndarray, sizes: np.ndarray, limits: Limits, *, clusters: int, seed: int
) -> list[list[int]]:
    """Clusters of similar clients give one client each in turn."""
    from sklearn.cluster import KMeans

    if not 1 <= clusters <= len(sizes):
        raise errors.UsageError(
            f"groups.clusters = {clusters} of {len(sizes)} clients: expected between 1 and "
            f"{len(sizes)}."
        )
    found = KMeans(clusters, n_init=10 if len(sizes) < 5000 else 1, random_state=seed % 2**32)
    return round_robin(found.fit_predict(estimates), _order(sizes, seed), sizes, limits)


def round_robin(
    labels: np.ndarray, order: np.ndarray, sizes: np.ndarray, limits: Limits
) -> list[list[int]]:
    """One client of each cluster in turn; in a cluster, the first of `order`."""
    waiting = [order[labels[order] == c][::-1].tolist() for c in range(int(labels.max()) + 1)]
    turns = itertools.cycle(waiting)
    return fill(lambda group: next(w for w in turns if w).pop(), sizes, limits)


def greedy(
    estimates: np.ndarray, sizes: np.ndarray, limits: Limits, *, distance: Metric,
    start: str = "random", seed: int = 0,
) -> list[list[int]]:
    """Always the client farthest from the group so far."""
    errors.lookup("groups.start", start, dict.fromkeys(("random", "released")))
    released = start == "released"
    left, order = _Left(estimates, distance), iter(_order(sizes, seed).tolist())
    uniform = np.full(estimates.shape[1], 1 / estimates.shape[1])
    total = np.zeros(estimates.shape[1])
    weight = 0.0

    def pick(group):
        nonlocal total, weight
        if not group:
            total, weight = np.zeros_like(total), 0.0
        if not group and not released:
            k = next(k for k in order if left.has(k))
        else:
            k = left.farthest(total / weight if weight else uniform, 0 if released else -np.inf)
        left.remove(k)
        share = float(sizes[k]) if released else 1.0
        total, weight = total + share * estimates[k], weight + share
        return k

    return fill(pick, sizes, limits)


class _Left:
    """The clients that are in no group yet; their rows are packed anew as they grow fewer."""

    def __init__(self, estimates: np.ndarray, distance: Metric):
        self.dtype = np.float32 if len(estimates) > MANY else np.float64
        self.slack = 100 * np.finfo(self.dtype).eps
        self.distance, self.estimates = distance, estimates.astype(self.dtype)
        self.clients, self.gone = np.arange(len(estimates)), np.zeros(len(estimates), bool)
        self._pack()

    def _pack(self) -> None:
        self.clients = self.clients[~self.gone]
        self.gone, self.removed = np.zeros(len(self.clients), bool), 0
        self.to = self.distance(self.estimates[self.clients])

    def _place(self, k: int) -> int | None:
        i = int(np.searchsorted(self.clients, k))
        there = i < len(self.clients) and self.clients[i] == k and not self.gone[i]
        return i if there else None

    def has(self, k: int) -> bool:
        return self._place(k) is not None

    def remove(self, k: int) -> None:
        self.gone[self._place(k)] = True
        self.removed += 1
        if 5 * self.removed > len(self.clients):
            self._pack()

    def farthest(self, centre: np.ndarray, floor: float = -np.inf) -> int:
        """Of those as far, up to rounding, the lowest number; of all, if none is above `floor`."""
        away = self.to(centre.astype(self.dtype))
        np.putmask(away, self.gone, -np.inf)
        most = away.max()
        if most <= floor:
            return int(self.clients[np.argmin(self.gone)])
        near = most if np.isinf(most) else most - self.slack * max(abs(most), 1)
        return int(self.clients[np.argmax(away >= near)])


def icg(
    estimates: np.ndarray, sizes: np.ndarray, limits: Limits, *, seed: int
) -> list[list[int]]:
    """One client of every cluster of equal size in each group."""
    count, order = limits.groups or count_of(sizes, limits), _order(sizes, seed)
    length = len(sizes) // count
    chosen, left = order[: length * count], order[length * count :]
    clusters = [chosen[part] for part in alike(estimates[chosen], count, seed)]
    groups = [[int(cluster[m]) for cluster in clusters] for m in range(count)]
    most = max(limits.clients, length) if not limits.groups else length + 1
    return redistribute(groups, left.tolist(), sizes, most)


def count_of(sizes: np.ndarray, limits: Limits) -> int:
    """How many groups the limits allow if clients are all of the mean size (the released code)."""
    length = limits.clients
    if limits.examples:
        length = max(1, min(length, -(-limits.examples * len(sizes) // int(sizes.sum()))))
    return max(1, len(sizes) // length, -(-len(sizes) // limits.clients))


def alike(rows: np.ndarray, size: int, seed: int = 0) -> list[np.ndarray]:
    """Positions of similar rows in clusters of `size`, of which the rows are a multiple."""
    found, todo = [], [np.arange(len(rows))]
    while todo:
        here = todo.pop()
        clusters = len(here) // size
        if len(here) * clusters <= AT_ONCE:
            labels = _balanced(rows[here], clusters, seed)
            found += [here[labels == c] for c in range(clusters)]
            continue
        order = np.sort(here)[np.argsort(rows[np.sort(here)] @ _direction(rows[here]),
                                         kind="stable")]
        cut = clusters // 2 * size
        todo += [order[cut:], order[:cut]]
    return [np.sort(part) for part in found]


def _balanced(rows: np.ndarray, clusters: int, seed: int, steps: int = 10) -> np.ndarray:
    """K-means whose clusters have the same size: the cluster of every row."""
    from sklearn.cluster import kmeans_plusplus

    size, labels = len(rows) // clusters, np.zeros(len(rows), int)
    if clusters == 1:
        return labels
    centres = kmeans_plusplus(rows, clusters, random_state=seed % 2**32)[0]
    for _ in range(steps):
        new = _with_room(rows, centres, size)
        if (new == labels).all():
            break
        labels = new
        sums = np.zeros_like(centres)
        np.add.at(sums, labels, rows)
        centres = sums / size
    return labels


def _with_room(rows: np.ndarray, centres: np.ndarray, size: int) -> np.ndarray:
    """Every row asks at its nearest centre with room, which takes the nearest of those."""
    away = np.stack([metrics.METRICS["euclidean"](rows)(c) for c in centres], axis=1)
    labels, room = np.full(len(rows), -1), np.full(len(centres), size)
    while (labels < 0).any():
        waiting = np.flatnonzero(labels < 0)
        open_ = np.flatnonzero(room > 0)
        distances = away[np.ix_(waiting, open_)]
        nearest = distances.argmin(axis=1)
        order = np.lexsort((waiting, distances[np.arange(len(waiting)), nearest], nearest))
        asked = nearest[order]
        turn = np.arange(len(asked)) - np.searchsorted(asked, asked)
        taken = turn < room[open_[asked]]
        labels[waiting[order[taken]]] = open_[asked[taken]]
        np.subtract.at(room, open_[asked[taken]], 1)
    return labels


def _direction(rows: np.ndarray, steps: int = 20) -> np.ndarray:
    """The principal direction, by power iteration from the row farthest from the mean."""
    rows = rows - rows.mean(axis=0)
    v = rows[np.argmax(np.einsum("ij,ij->i", rows, rows))]
    for _ in range(steps):
        length = np.linalg.norm(v)
        if length == 0:
            return np.zeros_like(v)
        v = rows.T @ (rows @ (v / length))
    return v


def oracle(counts: np.ndarray, sizes: np.ndarray, limits: Limits, *, seed: int) -> list[list[int]]:
    """Groups whose label counts are as those of all clients; `counts` are (clients, classes)."""
    whole = counts.sum(axis=0) / max(counts.sum(), 1)

    def distance(rows):  # -||(total + row) / n - whole||^2 of the total given, but for a constant
        own, across = rows.sum(axis=1), rows @ whole.astype(rows.dtype)
        squares, columns = np.einsum("ij,ij->i", rows, rows), np.ascontiguousarray(rows.T)

        def to(total):
            n = np.maximum(own + total.sum(), 1)
            length = squares + 2 * (total @ columns) + total @ total
            return 2 * (across + total @ whole.astype(rows.dtype)) / n - length / n**2

        return to

    left, order = _Left(counts, distance), iter(_order(sizes, seed).tolist())
    total = np.zeros(counts.shape[1])

    def pick(group):
        nonlocal total
        if not group:
            k, total = next(k for k in order if left.has(k)), np.zeros_like(total)
        else:
            k = left.farthest(total)
        left.remove(k)
        total = total + counts[k]
        return k

    return fill(pick, sizes, limits)


def fill(pick: Pick, sizes: np.ndarray, limits: Limits) -> list[list[int]]:
    """Groups that `pick` fills one after the other; those left over go to other groups."""
    length = len(sizes) // limits.groups if limits.groups else limits.clients
    minimum = 0 if limits.groups else limits.examples
    groups: list[list[int]] = []
    group: list[int] = []
    examples = 0
    for _ in sizes:
        group.append(pick(group))
        examples += int(sizes[group[-1]])
        last = limits.groups and len(groups) == limits.groups
        if not last and (len(group) == length or (minimum and examples >= minimum)):
            groups.append(group)
            group, examples = [], 0
    if limits.groups:
        return redistribute(groups, group, sizes, length + 1)
    if group and not minimum:
        return [*groups, group]
    short = groups and not group and sizes[groups[-1]].sum() < minimum
    left = groups.pop() if short else group
    return redistribute(groups, left, sizes, length)


def redistribute(
    groups: list[list[int]], left: list[int], sizes: np.ndarray, most: int
) -> list[list[int]]:
    """Groups with room, fewest examples first, take one each in turn, the last of `left` first."""
    room = sum(most - len(g) for g in groups if len(g) < most)
    if len(left) > room:
        raise errors.UsageError(
            f"{len(left)} clients are left over, and the other {len(groups)} groups have room for "
            f"{room} with groups.clients = {most}. Raise it, or change groups.examples."
        )
    turns = sorted((g for g in groups if len(g) < most), key=lambda g: int(sizes[g].sum()))
    waiting = list(left)
    while waiting:
        for group in turns:
            if waiting and len(group) < most:
                group.append(waiting.pop())
    return groups


def as_named(numbers: np.ndarray, limits: Limits) -> list[list[int]]:
    """The clients of each number, which are as many as asked for."""
    found, number = np.unique(numbers, return_inverse=True)
    if limits.groups != len(found):
        raise errors.UsageError(
            f"groups.count = {limits.groups}, but the names of the clients have {len(found)} "
            f"clusters (what stands before '/'): expected groups.count = {len(found)}."
        )
    return [np.flatnonzero(number == i).tolist() for i in range(len(found))]


def _order(sizes: np.ndarray, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, 17]).permutation(len(sizes))


def build(
    name: str, sizes: np.ndarray, limits: Limits, *, estimates: np.ndarray | None = None,
    distance: str = "euclidean", start: str = "random", clusters: int = 0, seed: int = 0,
) -> Partition:
    """The groups of a law, as a partition of the clients; `estimates` are one row per client.

    Of `oracle` they are label counts; `random` needs none.
    """
    sizes = np.asarray(sizes, np.int64)
    limits.check(sizes)
    if estimates is None and name != "random":
        errors.lookup("groups.name", name, dict.fromkeys(GROUPINGS))
        raise errors.UsageError(f"groups.name = {name} needs estimates of the clients.")
    rows = np.zeros((len(sizes), 1)) if estimates is None else np.asarray(estimates, float)
    if rows.shape[0] != len(sizes) or rows.ndim != 2 or not np.isfinite(rows).all():
        raise errors.UsageError(
            f"estimates of shape {rows.shape} for {len(sizes)} clients: expected one row of finite "
            "numbers for each."
        )
    make: dict[str, Callable[[], list[list[int]]]] = {
        "random": lambda: random(sizes, limits, seed=seed),
        "kmeans": lambda: kmeans(rows, sizes, limits, clusters=clusters, seed=seed),
        "greedy": lambda: greedy(
            rows, sizes, limits, distance=metric(distance, rows), start=start, seed=seed
        ),
        "icg": lambda: icg(rows, sizes, limits, seed=seed),
        "oracle": lambda: oracle(rows, sizes, limits, seed=seed),
        "names": lambda: as_named(rows[:, 0], limits),
    }
    chosen = errors.lookup("groups.name", name, make)
    with threadpoolctl.threadpool_limits(1):  # many small products, which threads only delay
        groups = Partition.of(chosen())
    groups.check(len(sizes), of="client")
    return groups


GROUPINGS = ("random", "kmeans", "greedy", "icg", "oracle")  # by limits
NAMES = "names"  # as the data say
