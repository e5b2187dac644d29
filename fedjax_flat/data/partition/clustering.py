"""Clients by what places look like: K-means of sequences, city by city (FedVPR's Clustering).

Caldarola 2024, section 6.3: the numbers of clusters of all cities sum to `clients`, and clusters
that are not valid (sequences.py) are dropped: 713 become 678 clients of Mapillary SLS. Left open
there, and so here: a city has clusters in proportion to its sequences, and a sequence is the mean
of its pictures' features. These are the rows of the file `features`, one for each train example in
its order, or else the pictures as thumbnails of 8x8 pixels without their mean and length.
"""

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.partition.base import CLIENTS, PARTITIONS, SEED, Partition
from fedjax_flat.data.partition.counts import apportion
from fedjax_flat.data.partition.sequences import HELD_OUT, Sequences, clients_of, sequences_of
from fedjax_flat.data.sources import Dataset, files
from fedjax_flat.registry import entry
from fedjax_flat.settings import Setting

_SIDE, _AT_ONCE = 8, 1000


def clustering(
    found: Sequences, features, num_clients: int, *, seed: int, validation_clients: int = 0
) -> Partition:
    """`features[i]` are those of example i; `num_clients` is the number of clusters."""
    from sklearn.cluster import KMeans

    cities, counts = np.unique(found.city, return_counts=True)
    if not len(cities) <= num_clients <= len(found.city):
        raise errors.UsageError(
            f"clients = {num_clients} clusters of {len(found.city)} sequences in {len(cities)} "
            f"cities: expected between {len(cities)} and {len(found.city)}."
        )
    number = np.bincount(found.of, minlength=len(found.city))
    means = np.zeros((len(found.city), features.shape[1]))
    np.add.at(means, found.of, features)
    means /= np.maximum(number, 1)[:, None]
    groups = []
    shares = np.minimum(apportion(counts, num_clients, low=1), counts)
    for city, clusters in zip(cities, shares, strict=True):
        here = np.flatnonzero(found.city == city)
        label = KMeans(int(clusters), n_init=1, random_state=seed).fit(means[here]).labels_
        members = [here[label == c] for c in range(clusters)]
        groups += [group for group in members if len(group) and found.valid(group)]
    return clients_of(
        found, groups, held_out=validation_clients, seed=seed,
        hint=f"Lower clients = {num_clients}.",
    )


def thumbnails(inputs) -> np.ndarray:
    """Small pictures as rows, each without its mean and of length 1."""
    if np.ndim(inputs) != 4:
        return np.asarray(inputs, np.float64).reshape(len(inputs), -1)
    height, width = (max(n // _SIDE, 1) for n in inputs.shape[1:3])
    rows = []
    for start in range(0, len(inputs), _AT_ONCE):
        x = np.asarray(inputs[start : start + _AT_ONCE], np.float64)
        x = x[:, : x.shape[1] // height * height, : x.shape[2] // width * width]
        n, h, w, c = x.shape
        x = x.reshape(n, h // height, height, w // width, width, c).mean((2, 4)).reshape(n, -1)
        x -= x.mean(1, keepdims=True)
        rows.append(x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12))
    return np.concatenate(rows)


def _features(dataset: Dataset, data_dir, path: str) -> np.ndarray:
    count = len(dataset.train.labels)
    if not path:
        return thumbnails(dataset.train.inputs)
    where = files.located(
        "partition.features", data_dir, path, "an .npy file with a row for each train example"
    )
    try:
        found = np.load(where, allow_pickle=False)
    except (OSError, ValueError, EOFError) as e:
        raise errors.UsageError(f"{where} is no .npy file of numbers ({e}).") from e
    if (
        not isinstance(found, np.ndarray) or found.ndim != 2 or len(found) != count
        or found.dtype.kind not in "fiu" or not np.isfinite(found).all()
    ):
        shape = getattr(found, "shape", None)
        raise errors.UsageError(
            f"{where} holds {type(found).__name__} of shape {shape}: expected finite numbers, "
            f"({count}, FEATURES), a row for each train example."
        )
    return found.astype(np.float64)


def _clustering(
    dataset: Dataset, data_dir, *, clients, features, validation_clients, seed
) -> Partition:
    """Sequences that look alike, by K-means in every city (FedVPR)."""
    found = sequences_of(dataset, "clustering")
    return clustering(found, _features(dataset, data_dir, features), clients, seed=seed,
                      validation_clients=validation_clients)


PARTITIONS.add("clustering", entry(_clustering, {
    "clients": CLIENTS,
    "features": Setting("", "an .npy file with a row for each train example; '' is thumbnails"),
    "validation_clients": HELD_OUT,
    "seed": SEED,
}))
