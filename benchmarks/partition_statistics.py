"""Classes per client of our Dirichlet partitions beside the released ones.

command: python benchmarks/partition_statistics.py --data FOLDER
FOLDER holds cifar10-labels.npz, cifar100-labels.npz (or the CIFAR archives) and fedsam-splits.npz.
"""

import argparse
import pathlib

import numpy as np

import fedjax_flat as ff
from fedjax_flat.report import tables

SETTINGS = [("cifar10", a) for a in (0, 0.05, 0.5, 100, 1000)]
SETTINGS += [("cifar100", a) for a in (0, 0.05, 0.5, 100, 1000)]


def train_labels(name: str, folder: pathlib.Path) -> np.ndarray:
    """Labels alone where only they are present."""
    path = folder / f"{name}-labels.npz"
    if path.exists():
        with np.load(path) as z:
            return z["train_label" if name == "cifar10" else "train_fine"]
    return ff.data.load(name, folder).train.labels


def main():
    """Prints one row per dataset and alpha."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=pathlib.Path, required=True)
    folder = parser.parse_args().data
    rows = []
    for name, alpha in SETTINGS:
        labels = train_labels(name, folder)
        means, lows, highs = [], [], []
        for seed in range(5):
            partition = ff.data.dirichlet(labels, 100, alpha=alpha, seed=seed)
            owned = np.array_equal(np.sort(partition.indices), np.arange(len(labels)))
            assert owned, "every image belongs to exactly one client"
            stats = ff.data.statistics(partition, labels)
            assert stats["min_size"] == stats["max_size"] == 500
            means.append(stats["mean_classes"])
            lows.append(stats["min_classes"])
            highs.append(stats["max_classes"])
        ours = f"{min(lows)} / {np.mean(means):.2f} ± {np.std(means):.2f} / {max(highs)}"
        try:
            split = ff.data.released(folder / "fedsam-splits.npz", f"{name}_alpha_{alpha:.2f}")
            stats = ff.data.statistics(split, labels)
            theirs = "{min_classes} / {mean_classes:.2f} / {max_classes}".format(**stats)
        except ff.UsageError:
            theirs = "not released"
        rows.append([f"{name} alpha {alpha:g}", ours, theirs])
    header = ["classes per client (min / mean / max)", "ours, 5 seeds", "released"]
    print(tables.table(header, rows))


if __name__ == "__main__":
    main()
