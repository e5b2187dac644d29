"""Who owns which example: labels -> one index list per client.

`dirichlet` follows Hsu, Qi and Brown, "Measuring the effects of non-identical data distribution
for federated visual classification" (2019): client k draws q_k ~ Dir(alpha * p), p the class prior
of the whole set, and then its examples one by one, class from q_k, without replacement. A class
that has run out leaves q_k, which is renormalised.

Where the paper is silent: when every class that q_k supports has run out, q_k is drawn again over
the classes that are left. alpha = 0 is the limit, one class per client: clients are dealt to
classes in proportion to the prior, and each class is shared evenly among its clients, so client
sizes are equal exactly when the classes are.
"""

import dataclasses
import hashlib
import os
import pathlib
import zipfile

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.sources import DATA_VARIABLE, Dataset
from fedjax_flat.registry import Entry, Registry, entry
from fedjax_flat.settings import Setting


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
        return cls(flat.astype(np.int32), np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))

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

    def client(self, k: int) -> np.ndarray:
        """The indices of client k."""
        return self.indices[self.offsets[k] : self.offsets[k + 1]]

    def check(self, count: int, of: str = "example") -> None:
        """Raises unless every index is valid and owned by at most one client (or group)."""
        owner = "client" if of == "example" else "group"
        if self.num_clients == 0:
            raise errors.UsageError(f"partition without a {owner}: expected one or more.")
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

    def save(self, path: str | os.PathLike) -> None:
        """Writes the index lists and their hash, atomically."""
        partial = pathlib.Path(f"{path}.partial")
        with open(partial, "wb") as f:
            np.savez_compressed(f, indices=self.indices, offsets=self.offsets,
                                content_hash=np.array(self.content_hash))
        os.replace(partial, path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Partition":
        """Reads what `save` wrote and verifies its hash."""
        try:
            with open(path, "rb") as f, np.load(f, allow_pickle=False) as z:
                partition = cls(z["indices"], z["offsets"])
                expected = str(z["content_hash"])
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as e:
            raise errors.UsageError(f"{path} is not a saved partition ({e}).") from e
        if partition.content_hash != expected:
            raise errors.UsageError(f"{path}: content hash differs from the one saved with it.")
        return partition


def iid(labels, num_clients: int, *, seed: int, size_sigma: float = 0.0) -> Partition:
    """Shuffled and dealt: every client sees the class prior."""
    rng = np.random.default_rng(seed)
    sizes = client_sizes(len(labels), num_clients, size_sigma, rng)
    return Partition.of(np.split(rng.permutation(len(labels)), np.cumsum(sizes)[:-1]))


def dirichlet(
    labels, num_clients: int, *, alpha: float, seed: int, size_sigma: float = 0.0
) -> Partition:
    """Label skew of strength `alpha` as in Hsu et al.; see the module's docstring."""
    if alpha < 0:
        raise errors.UsageError(
            f"alpha = {alpha}: a Dirichlet concentration cannot be negative. Use 0 for one class "
            "per client, large values (100, 1000) for nearly identical clients."
        )
    rng = np.random.default_rng(seed)
    labels = np.asarray(labels)
    by_class = [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]
    if alpha == 0:
        if size_sigma:
            raise errors.UsageError("alpha = 0 fixes client sizes; size_sigma must be 0 with it.")
        return _one_class_per_client(by_class, num_clients, rng)

    sizes = client_sizes(len(labels), num_clients, size_sigma, rng)
    left = np.array([len(x) for x in by_class])
    prior = left / left.sum()
    taken = np.zeros_like(left)
    clients = []
    # In random order, so that the leftovers of nearly exhausted classes fall on no fixed client.
    for size in sizes:
        counts = _draw_class_counts(rng, size, alpha, prior, left)
        clients.append(np.concatenate(
            [by_class[c][taken[c] : taken[c] + n] for c, n in enumerate(counts)]
        ))
        taken += counts
        left -= counts
    return Partition.of([clients[i] for i in rng.permutation(num_clients)])


def _draw_class_counts(rng, size, alpha, prior, left) -> np.ndarray:
    """How many examples of each class one client takes.

    Drawing `size` classes at once and drawing again, from the renormalised q, whatever a class
    could not give has the same law as drawing one example after another.
    """
    counts = np.zeros_like(left)
    q = rng.dirichlet(alpha * prior)
    while (missing := size - counts.sum()) > 0:
        available = left - counts
        q = np.where(available > 0, q, 0.0)
        if q.sum() == 0:
            q = np.zeros_like(prior)
            q[available > 0] = rng.dirichlet(alpha * prior[available > 0])
        counts += np.minimum(rng.multinomial(missing, q / q.sum()), available)
    return counts


def _one_class_per_client(by_class, num_clients, rng) -> Partition:
    share = np.array([len(x) for x in by_class], float)
    share *= num_clients / share.sum()
    clients_of = np.maximum(np.floor(share).astype(int), 1)
    if num_clients < len(by_class):
        raise errors.UsageError(
            f"alpha = 0 gives each client one class, so {len(by_class)} classes need at least "
            f"{len(by_class)} clients; {num_clients} were asked for."
        )
    while clients_of.sum() != num_clients:  # largest remainder, never below one client per class
        step = 1 if clients_of.sum() < num_clients else -1
        gap = np.where((step > 0) | (clients_of > 1), step * (share - clients_of), -np.inf)
        clients_of[gap.argmax()] += step
    parts = [p for x, n in zip(by_class, clients_of, strict=True) for p in np.array_split(x, n)]
    return Partition.of([parts[i] for i in rng.permutation(num_clients)])


def client_sizes(num_examples: int, num_clients: int, sigma: float, rng) -> np.ndarray:
    """Sizes that sum to `num_examples`: equal up to one, or log-normal with deviation `sigma`."""
    if not 1 <= num_clients <= num_examples:
        raise errors.UsageError(
            f"{num_clients} clients for {num_examples} examples: expected between 1 and "
            f"{num_examples}."
        )
    if sigma < 0:
        raise errors.UsageError(f"size_sigma = {sigma}: expected 0 (equal sizes) or more.")
    weights = np.exp(sigma * rng.standard_normal(num_clients)) if sigma else np.ones(num_clients)
    ends = np.round(np.cumsum(weights) / weights.sum() * num_examples).astype(int)
    return np.diff(ends, prepend=0)


def released(path: str | os.PathLike, name: str) -> Partition:
    """One of the splits released with FedSAM and FedGloSS, e.g. `cifar10_alpha_0.05`.

    The file holds `NAME_idx` and `NAME_off`. Known quirk: in CIFAR-10's, train image 10100 belongs
    to no client.
    """
    try:
        with open(path, "rb") as f, np.load(f, allow_pickle=False) as z:
            names = {key.removesuffix("_off"): key for key in z.files if key.endswith("_off")}
            key = errors.lookup("released split", name, names)
            offsets = z[key].astype(np.int64)
            return Partition(z[f"{name}_idx"].astype(np.int32), offsets)
    except (OSError, zipfile.BadZipFile) as e:
        raise errors.UsageError(
            f"cannot read released splits from {path} ({e}). Expected fedsam-splits.npz; name it "
            "with --config.partition.file."
        ) from e


def hold_out(
    partition: Partition, share: float, *, source: str = "clients", seed: int = 0
) -> tuple[Partition, np.ndarray]:
    """(what clients keep to train on, the validation examples): `share` of their examples.

    From `clients`: that share of every client's. From `server`: of all of theirs, whoever has them.
    """
    errors.lookup("data.validation_from", source, dict.fromkeys(("clients", "server")))
    rng = np.random.default_rng([seed, 1])
    if source == "clients":
        taken = np.concatenate([
            rng.permutation(own)[: int(share * len(own))]
            for own in np.split(partition.indices, partition.offsets[1:-1])
        ])
    else:
        taken = rng.permutation(partition.indices)[: int(share * partition.indices.size)]
    if not taken.size:
        raise errors.UsageError(
            f"data.validation = {share} holds out no example: clients have "
            f"{partition.sizes.min()} to {partition.sizes.max()}. Raise it, or take it from all: "
            "data.validation_from = 'server'."
        )
    left = [own[~np.isin(own, taken)]
            for own in np.split(partition.indices, partition.offsets[1:-1])]
    return Partition.of(left), np.sort(taken)


def statistics(partition: Partition, labels) -> dict[str, float]:
    """Classes per client (min, mean, max) and sizes: what the papers print beside a split."""
    labels = np.asarray(labels)
    classes = [len(np.unique(labels[partition.client(k)])) for k in range(partition.num_clients)]
    return {
        "clients": partition.num_clients,
        "examples": int(partition.sizes.sum()),
        "min_size": int(partition.sizes.min()),
        "max_size": int(partition.sizes.max()),
        "min_classes": min(classes),
        "mean_classes": float(np.mean(classes)),
        "max_classes": max(classes),
    }


_CLIENTS = Setting(20, "how many", at_least=1)
_SEED = Setting(0, "apart from the training seed, so that seeds share their clients", at_least=0)
_SIGMA = Setting(0.0, "deviation of log sizes; 0 is equal sizes", at_least=0)


def _iid(dataset: Dataset, data_dir, *, clients, seed, size_sigma) -> Partition:
    """Every client sees the class prior."""
    del data_dir
    return iid(dataset.train.labels, clients, seed=seed, size_sigma=size_sigma)


def _dirichlet(dataset: Dataset, data_dir, *, clients, alpha, seed, size_sigma) -> Partition:
    """Label skew as in Hsu et al. 2019."""
    del data_dir
    labels = dataset.train.labels
    if np.ndim(labels) != 1 or np.asarray(labels).dtype.kind not in "iub":
        raise errors.UsageError(
            f"partition dirichlet needs one class per example; {dataset.name} has labels of shape "
            f"{np.shape(labels)} and type {np.asarray(labels).dtype}. Use iid, or your own."
        )
    return dirichlet(labels, clients, alpha=alpha, seed=seed, size_sigma=size_sigma)


def _released(dataset: Dataset, data_dir, *, file, split) -> Partition:
    """A split that was released with FedSAM and FedGloSS."""
    del dataset
    folder = data_dir or os.environ.get(DATA_VARIABLE, ".")
    return released(file or os.path.join(folder, "fedsam-splits.npz"), split)


# make(dataset, data_dir, **settings) -> Partition
PARTITIONS: Registry[Entry] = Registry("partition")
PARTITIONS.add("dirichlet", entry(_dirichlet, {
    "clients": _CLIENTS, "alpha": Setting(0.5, "0 is one class per client", at_least=0),
    "size_sigma": _SIGMA, "seed": _SEED,
}))
PARTITIONS.add("iid", entry(_iid, {"clients": _CLIENTS, "size_sigma": _SIGMA, "seed": _SEED}))
PARTITIONS.add("released", entry(_released, {
    "file": Setting("", "path of fedsam-splits.npz; else it is in the data folder"),
    "split": Setting("", "e.g. cifar10_alpha_0.05"),
}))
