"""Clusters of clients with like styles, as many as have the best silhouette (LADD, algorithm 9).

Shenaj et al. (WACV 2023); Fani's thesis, algorithm 9; Caldarola's, algorithm 7. a_k is the style of
client k, a flat vector. For every number o of clusters and every seed, k-means; delta_k is the mean
distance of a_k to the others of its cluster, Delta_k the smallest mean distance to another cluster:

    of one o:   the seed of the smallest  sum_k delta_k           (`inertia`: what k-means keeps)
    sigma_k  =  (Delta_k - delta_k) / max(Delta_k, delta_k),      0 for a cluster of one
    o        =  that of the largest mean of sigma_k, the first of equals

The numbers that are tried, and the seeds, are not printed; the released program has 4 to 19 and ten
starts.
"""

from collections.abc import Iterable

import numpy as np
import threadpoolctl

from fedjax_flat import errors


def clusters_of(
    styles: np.ndarray, numbers: Iterable[int], *, starts: int = 10, kept: str = "distance"
) -> tuple[np.ndarray, dict[int, float]]:
    """(the cluster of every client, the mean silhouette of every number that was tried)."""
    from sklearn.cluster import KMeans

    flat = np.asarray(styles, np.float64).reshape(len(styles), -1)
    apart = np.linalg.norm(flat[:, None] - flat[None], axis=-1)
    best: dict[int, np.ndarray] = {}
    for o in numbers:
        if not 1 <= o <= len(flat):
            raise errors.UsageError(
                f"{o} clusters of {len(flat)} clients: expected 1 to {len(flat)}. Lower "
                "algorithm.ladd.clusters, or algorithm.ladd.most."
            )
        with threadpoolctl.threadpool_limits(1):
            runs = [KMeans(o, n_init=1, random_state=seed).fit(flat) for seed in range(starts)]
        cost = [
            run.inertia_ if kept == "inertia" else _within(apart, run.labels_).sum() for run in runs
        ]
        best[o] = runs[int(np.argmin(cost))].labels_
    scores = {o: float(silhouettes(apart, labels).mean()) for o, labels in best.items()}
    return best[max(scores, key=lambda o: scores[o])].astype(np.int32), scores


def centroids(styles: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """mu_s: the mean style of a cluster's clients."""
    count = int(clusters.max()) + 1
    return np.stack([styles[clusters == s].mean(axis=0) for s in range(count)])


def nearest(styles: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """The number of the nearest centre of every style, the first of equals."""
    flat = lambda x: np.asarray(x, np.float64).reshape(len(x), -1)
    return np.linalg.norm(flat(styles)[:, None] - flat(centres)[None], axis=-1).argmin(axis=1)


def _within(apart: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """delta_k; 0 for a client that is alone."""
    same = labels[:, None] == labels[None]
    return (apart * same).sum(axis=1) / np.maximum(same.sum(axis=1) - 1, 1)


def silhouettes(apart: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """sigma_k, from the distances of all clients; 0 where there is one cluster."""
    names = np.unique(labels)
    if len(names) < 2:
        return np.zeros(len(labels))
    own, sizes = labels[:, None] == names[None], np.array([(labels == c).sum() for c in names])
    means = (apart @ own.astype(float)) / sizes
    other = np.where(own, np.inf, means).min(axis=1)
    inner = _within(apart, labels)
    alone = sizes[np.searchsorted(names, labels)] == 1
    largest = np.maximum(other, inner)
    return np.where(alone | (largest == 0), 0.0, (other - inner) / np.where(largest, largest, 1))
