"""Styles of clients in pictures and tables: images restyled, styles on a plane, clusters."""

import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import threadpoolctl

from fedjax_flat import data as data_lib
from fedjax_flat import experiment, rng
from fedjax_flat.data import Dataset, Partition, styles
from fedjax_flat.experiment import usage
from fedjax_flat.experiment.by_style import style_of_clients
from fedjax_flat.report import pictures, tables

SHOWN = 4  # clients of whom an image is drawn
MOST = 1000  # styles on the plane


class StyleMap(NamedTuple):
    """Styles of images on a plane: those that are alike are near each other."""

    points: np.ndarray  # (images, 2)
    owners: np.ndarray  # whose image it is, by number
    names: tuple[str, ...]  # of owners


def map_of(
    config: ml_collections.ConfigDict, dataset: Dataset, partition: Partition
) -> StyleMap | None:
    """Styles of an experiment that has some: of train images, or of a method's clusters."""
    style, method = experiment.build_style(config, dataset), usage.method_of(config)
    if method.styles:
        style = style_of_clients(config.algorithm[method.section], dataset)
    return style and style_map(style, dataset, partition)


def style_map(style: styles.Style, dataset: Dataset, partition: Partition) -> StyleMap | None:
    """Styles of single train images by t-SNE (van der Maaten and Hinton 2008); None of too few.

    Every number of a style counts alike. Owners are the data's own clients, or the partition's.
    """
    from sklearn.manifold import TSNE

    everybody = style._replace(sent="all", donors="all")
    bank = styles.bank(everybody, dataset, partition)
    flat = [np.asarray(x, np.float64).reshape(bank.size, -1) for x in jax.tree.leaves(bank.styles)]
    values = np.concatenate(flat, axis=1)
    chosen = np.unique(np.linspace(0, bank.size - 1, MOST).astype(int))
    if len(chosen) < 5:
        return None
    if dataset.clients and dataset.owners is not None:
        owners, names = np.asarray(dataset.owners)[partition.indices], tuple(dataset.clients)
    else:
        owners = partition.client_of
        names = tuple(f"client {k}" for k in range(partition.num_clients))
    spread = values.std(axis=0)
    values = (values - values.mean(axis=0)) / np.where(spread > 0, spread, 1)
    with threadpoolctl.threadpool_limits(1):
        plane = TSNE(perplexity=min(30, (len(chosen) - 1) / 3), init="pca", random_state=0)
        points = plane.fit_transform(values[chosen].astype(np.float32))
    return StyleMap(points, np.asarray(owners)[chosen], names)


def draw_map(found: StyleMap, path: pathlib.Path) -> pathlib.Path:
    """A colour per owner."""
    figure, (axes,) = pictures.new_figure(1, 1, (6, 4.5))
    for i, owner in enumerate(np.unique(found.owners)):
        own = found.points[found.owners == owner]
        axes.scatter(*own.T, s=8, color=f"C{i % 10}", label=found.names[owner])
    axes.set(xticks=[], yticks=[], title="styles of images, by t-SNE")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return pictures.save(figure, path)


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
