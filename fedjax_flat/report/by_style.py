"""Styles of clients in pictures and tables: samples of images restyled, clients by cluster."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_flat import data as data_lib
from fedjax_flat import rng
from fedjax_flat.data import Dataset, Partition, styles
from fedjax_flat.report import pictures, tables

SHOWN = 4  # clients of whom an image is drawn


def draw_styles(
    style: styles.Style, dataset: Dataset, partition: Partition, path: pathlib.Path, seed: int
) -> pathlib.Path:
    """An image of some clients, a row each, and what it becomes by styles that are drawn."""
    bank = styles.bank(style, dataset, partition)
    present = np.flatnonzero(partition.sizes)
    chosen = present[np.linspace(0, len(present) - 1, min(SHOWN, len(present))).astype(int)]
    height, width, _ = dataset.input_shape
    figure, axes = pictures.new_figure(len(chosen), 1, (9, 9 * len(chosen) * height / width / 6))
    for ax, k in zip(np.ravel(axes), chosen, strict=True):
        image = jnp.asarray(dataset.train.inputs[partition.client(k)[0]])
        copies = jnp.repeat(image[None], 5, axis=0)
        marked = data_lib.federated.marked(copies, jnp.int32(k), jnp.zeros(5, jnp.int32), bank)
        key = rng.fold(jax.random.key(seed), "styles", int(k))
        shown = [image, *styles.apply(style, key, marked)]
        strip = np.concatenate(
            [np.pad(np.asarray(x, np.float32) / dataset.max_value, ((0, 0), (0, 2), (0, 0)),
                    constant_values=1) for x in shown], axis=1,
        )
        ax.imshow(np.clip(strip.squeeze(), 0, 1), cmap="gray", vmin=0, vmax=1)
        ax.set_axis_off()
    np.ravel(axes)[0].set_title("as it is, then as others' images are", fontsize=9, loc="left")
    return pictures.save(figure, path)


def cluster_table(of_client: np.ndarray, dataset: Dataset, partition: Partition) -> str:
    """How many clients of each natural one are in each cluster, by whose most of a client is."""
    names = dataset.clients or ("all",)
    owners = np.zeros(data_lib.count_of(dataset.train), int)
    if dataset.clients and dataset.owners is not None:
        owners = np.asarray(dataset.owners)
    counts = np.zeros((len(names), int(of_client.max()) + 1), int)
    for k in np.flatnonzero(partition.sizes).tolist():
        counts[np.bincount(owners[partition.client(k)]).argmax(), of_client[k]] += 1
    there = counts.sum(axis=1) > 0
    rows = [[name, *map(str, row)] for name, row, some in zip(names, counts, there, strict=True)
            if some]
    header = ["clients by cluster", *map(str, range(counts.shape[1]))]
    return tables.table(header, rows)
