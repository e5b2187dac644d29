"""Every law of a partition beside what is documented of it, with seconds.

command: python benchmarks/partition_statistics.py [--data FOLDER]
FOLDER holds fedsam-splits.npz and cifar10-labels.npz, cifar100-labels.npz (or the CIFAR archives):
then the released splits stand beside ours. Without it labels are as CIFAR's, in order.

Documented: classes per client of the released splits (min / mean / max; read from the files),
sizes and numbers of clients of TFF's Pachinko allocation, McMahan et al. 2017, Mora's thesis
(chapter 7), the imbalance variants and the personal splits of Fani's thesis (chapters 3 and 4).
"""

import argparse
import functools
import pathlib
import time

import numpy as np

import fedjax_flat as ff
from fedjax_flat.report import tables

SEEDS = 5
COARSE = tuple(c // 5 for c in range(100))  # of equal sizes, as CIFAR-100's twenty


def train_labels(name: str, folder: pathlib.Path | None) -> np.ndarray:
    """Labels alone where only they are present, else made up in the same numbers."""
    if folder is None:
        classes = 10 if name == "cifar10" else 100
        return np.repeat(np.arange(classes), 50_000 // classes)
    path = folder / f"{name}-labels.npz"
    if path.exists():
        with np.load(path) as z:
            return z["train_label" if name == "cifar10" else "train_fine"]
    return ff.data.load(name, folder).train.labels


def described(make, labels) -> list[str]:
    """Classes per client, sizes, Jaccard index and seconds of `make(seed)`, over seeds."""
    found, seconds = [], []
    for seed in range(SEEDS):
        start = time.perf_counter()
        partition = make(seed)
        seconds.append(time.perf_counter() - start)
        partition.check(len(labels))
        found.append(ff.data.statistics(partition, labels))
    means = [s["mean_classes"] for s in found]
    return [
        f"{found[0]['clients']}",
        f"{min(s['min_size'] for s in found)} / {np.mean([s['mean_size'] for s in found]):.0f} / "
        f"{max(s['max_size'] for s in found)}",
        f"{min(s['min_classes'] for s in found)} / {np.mean(means):.2f} ± {np.std(means):.2f} / "
        f"{max(s['max_classes'] for s in found)}",
        f"{np.mean([s['mean_jaccard'] for s in found]):.3f}",
        f"{np.median(seconds):.2f}",
    ]


def released(folder, name, labels) -> str:
    """Classes per client of a released split, if it is there."""
    try:
        split = ff.data.released(folder / "fedsam-splits.npz", name)
    except ff.UsageError:
        return "not released"
    stats = ff.data.statistics(split, labels)
    return "{min_classes} / {mean_classes:.2f} / {max_classes}, {mean_jaccard:.3f}".format(**stats)


def dirichlet_rows(folder):
    """Both laws of counts at the papers' alphas."""
    for name in ("cifar10", "cifar100"):
        labels = train_labels(name, folder)
        for alpha in (0, 0.05, 0.5, 100, 1000):
            for counts in ("drawn", "rounded")[: 2 if alpha else 1]:
                law = functools.partial(
                    ff.data.dirichlet, labels, 100, alpha=alpha, counts=counts
                )
                known = released(folder, f"{name}_alpha_{alpha:.2f}", labels) if folder else ""
                row = described(lambda s, law=law: law(seed=s), labels)
                yield [f"{name} dirichlet {alpha:g} {counts}", *row, known]


def other_rows(folder):
    """The other laws, on CIFAR-100 unless said otherwise."""
    ten, hundred = (train_labels(name, folder) for name in ("cifar10", "cifar100"))
    per_class = functools.partial(ff.data.per_class, hundred)
    owners = np.random.default_rng(0).zipf(1.6, 50_000) % 3000
    cells = {
        "iid": (hundred, lambda s: ff.data.iid(hundred, 100, seed=s), "500 each"),
        "iid, size_alpha 1": (
            hundred, lambda s: ff.data.iid(hundred, 100, seed=s, size_alpha=1.0), ""),
        "per_class 0.5": (hundred, lambda s: per_class(100, alpha=0.5, seed=s), ""),
        "per_class 0.2, cap, 100 draws (FedSeq)": (
            hundred, lambda s: per_class(500, alpha=0.2, seed=s, cap=True, draws=100),
            "500 clients, about 100 each"),
        "per_class 0.1, rounded (Mora)": (
            hundred, lambda s: per_class(100, alpha=0.1, seed=s, min_size=1, rounded=True),
            "100 clients, about 50,000 in all"),
        "pachinko (TFF)": (
            hundred, lambda s: ff.data.pachinko(hundred, COARSE, 500, seed=s),
            "500 clients, 100 each"),
        "cifar10 shards, 2 (McMahan)": (
            ten, lambda s: ff.data.shards(ten, 100, shards_per_client=2, seed=s),
            "at most 2 classes"),
        "cifar10 shards, 2 distinct": (
            ten, lambda s: ff.data.shards(ten, 100, shards_per_client=2, seed=s, distinct=True),
            "2 classes"),
        "natural, min_size 2": (hundred, lambda s: ff.data.natural(owners, min_size=2, seed=s), ""),
        "natural, merged to 100": (
            hundred, lambda s: ff.data.natural(owners, resize_to=100, seed=s), ""),
        "local train, 45 % in test": (
            hundred,
            lambda s: ff.data.local_split(ff.data.natural(owners), 0.45, min_size=10, seed=s)[0],
            "at least 5"),
    }
    for variant in "ABCD":
        whole = ff.data.dirichlet(hundred, 100, alpha=0, seed=0)
        cells[f"alpha 0, imbalance {variant}"] = (
            hundred,
            lambda s, v=variant, p=whole: ff.data.restrict(p, ff.data.imbalance(hundred, v, s)),
            "25,000 in all")
    for name, (labels, make, known) in cells.items():
        yield [name, *described(make, labels), known]


def main():
    """Prints one row per law."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=pathlib.Path)
    folder = parser.parse_args().data
    header = [f"partition, {SEEDS} seeds", "clients", "sizes", "classes per client", "Jaccard",
              "seconds", "documented, or released (classes, Jaccard)"]
    print(tables.table(header, [*dirichlet_rows(folder), *other_rows(folder)]))


if __name__ == "__main__":
    main()
