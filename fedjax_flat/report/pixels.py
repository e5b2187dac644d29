"""Which classes the pixels of each client are of: a box for every class (Fani 2025, figure 5.4).

    share of class c at client k = its pixels of class c / its pixels that are of any class

A box stands for all clients that have examples, also those whose share is 0; above it is how many
of them have the class at all.
"""

import pathlib

import numpy as np

from fedjax_flat.data import Dataset, Partition
from fedjax_flat.report import masks, pictures


def pixel_counts(dataset: Dataset, partition: Partition) -> np.ndarray | None:
    """Pixels of each class that each client has; None where labels are not of pixels."""
    if dataset.task != "segmentation":
        return None
    classes = dataset.num_classes
    counts = np.zeros((partition.num_clients, classes), np.int64)
    for k in range(partition.num_clients):
        for i in partition.client(k):
            own = np.bincount(np.ravel(dataset.train.labels[i]), minlength=classes)
            counts[k] += own[:classes]  # ignored values are past them
    return counts


def shares(counts: np.ndarray) -> np.ndarray:
    """Of each class at each client with labelled pixels."""
    counts = counts[counts.sum(1) > 0]
    return counts / counts.sum(1, keepdims=True)


def draw(counts: np.ndarray, dataset: Dataset, path: pathlib.Path) -> pathlib.Path:
    """A box for every class, in the class's colour."""
    names, colours = masks.names_of(dataset), masks.colours_of(dataset) / 255
    found = 100 * shares(counts)
    figure, (axes,) = pictures.new_figure(1, 1, (2.0 + 0.6 * len(names), 3.6))
    boxes = axes.boxplot(found, patch_artist=True, widths=0.6, flierprops={"markersize": 3},
                         medianprops={"color": "black"})
    for box, colour in zip(boxes["boxes"], colours, strict=True):
        box.set_facecolor(colour)
    high = max(found.max(initial=0), 1)
    for c, column in enumerate(counts.T):
        axes.text(c + 1, 1.03 * high, str((column > 0).sum()), ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(1, len(names) + 1), names, rotation=45, ha="right")
    axes.set(ylabel="pixels of a client (%)", ylim=(-0.02 * high, 1.12 * high))
    axes.set_title(f"{len(found)} clients; above: how many have the class", fontsize=9, loc="left")
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    return pictures.save(figure, path)
