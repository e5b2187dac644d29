"""Who owns what: a partition in numbers and pictures.

Class counts per client as a heat map, or as the papers' bubbles where there are few clients;
classes and examples per client; the mean Jaccard index of the clients' class sets (Fanì 2025,
section 3), or the shares of pixels of each class; and some examples of some clients. Of places, a
map instead: positions, coloured by client. Of identities, which retrieval tells apart, counts are
as those of classes.
"""

import pathlib
import time
from typing import Any

import ml_collections
import numpy as np

from fedjax_flat import data as data_lib
from fedjax_flat import errors, experiment
from fedjax_flat.data import Dataset, Partition
from fedjax_flat.data.sources.places import city_of
from fedjax_flat.experiment import config as config_lib
from fedjax_flat.experiment.by_style import build_clusters
from fedjax_flat.report import by_style, pictures, pixels, tables

BUBBLES = 30  # clients, up to which counts are drawn as bubbles
SHOWN = 8  # clients, and examples of each, in the picture of examples
CITIES = 12  # in the map, the largest
COLOURS = np.array(["C0", "C1", "C2", "C3", "C4", "C5", "C8", "C9"])  # of clients; grey is nobody


def ownership(
    config: ml_collections.ConfigDict,
    out: str,
    data_dir: str | None = None,
    *,
    natural: bool = False,
) -> str:
    """A table of the data and the clients of a config, and figures in folder `out`.

    With `natural`, data that have clients of their own are shown with these.
    """
    config_lib.validate(config)
    source = data_lib.SOURCES.find(config.data.name)
    options = config_lib.options_of(config, "data", source)
    dataset = data_lib.load(config.data.name, data_dir, **options)
    if natural and dataset.owners is not None:
        config = config_lib.from_flat({"data.name": config.data.name, "partition.name": "natural"})
    began = time.perf_counter()
    partition = experiment.build_partition(config, dataset, data_dir)
    seconds = time.perf_counter() - began
    rows: list[tuple[str, Any]] = [
        ("train examples", data_lib.count_of(dataset.train)),
        ("test examples", data_lib.count_of(dataset.test)),
        ("of one example", _shape(dataset)),
        *_of_labels(dataset),
        ("partition", f"{config.partition.name}, made in {seconds:.2f} s"),
        ("clients", partition.num_clients),
        ("examples owned", int(partition.sizes.sum())),
        ("examples per client", _spread(partition.sizes)),
    ]
    folder = pathlib.Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    counts = class_counts(dataset, partition)
    if dataset.owners is not None and dataset.clients and dataset.task == "retrieval":
        rows += _of_cities(dataset, partition)
    if is_placed(dataset):
        made.append(draw_map(dataset, partition, folder / "map.png"))
    if counts is not None:
        many, one = _called(dataset)
        rows += [
            (f"{many} per client", _spread((counts > 0).sum(1))),
            (f"clients per {one}", _spread((counts > 0).sum(0))),
            ("mean Jaccard index", f"{data_lib.mean_jaccard(partition, dataset.train.labels):.4f}"),
        ]
        made.append(draw_counts(counts, dataset, folder / "ownership.png"))
    if (of_pixels := pixels.pixel_counts(dataset, partition)) is not None and of_pixels.any():
        rows.append(("clients per class", _spread((of_pixels > 0).sum(0))))
        made.append(pixels.draw(of_pixels, dataset, folder / "pixels.png"))
    if (shown := draw_examples(dataset, partition, folder / "examples.png")) is not None:
        made.append(shown)
    if style := experiment.build_style(config, dataset):
        path = folder / "styles.png"
        made.append(by_style.draw_styles(style, dataset, partition, path, config.seed))
    if found := by_style.map_of(config, dataset, partition):
        made.append(by_style.draw_map(found, folder / "style_map.png"))
    clusters = build_clusters(config, dataset, partition, None)
    if clusters and clusters.number > 1:
        scores = ", ".join(f"{score:.3f} of {o}" for o, score in clusters.scores.items())
        rows.append(("mean silhouette of clusters", scores))
    text = tables.table(["", config.data.name], [[a, str(b)] for a, b in rows], left=(0, 1))
    if clusters and clusters.number > 1:
        text += "\n\n" + by_style.cluster_table(clusters.of_client, dataset, partition)
    return "\n".join([text, *(tables.named("figure", path) for path in made)])


def class_counts(dataset: Dataset, partition: Partition) -> np.ndarray | None:
    """Examples of each class that each client has; None where labels are no single classes."""
    labels = dataset.train.labels
    if dataset.task not in ("classification", "retrieval") or np.ndim(labels) != 1:
        return None
    return data_lib.class_counts(partition, labels, dataset.num_classes)


def draw_counts(counts: np.ndarray, dataset: Dataset, path: pathlib.Path) -> pathlib.Path:
    """Clients across, classes down; sizes and numbers of classes beside it."""
    figure, axes = pictures.new_figure(1, 3, (12, 3.8))
    clients, classes = counts.shape
    if clients <= BUBBLES and classes <= 2 * BUBBLES:
        k, c = np.nonzero(counts)
        area = 220 * counts[k, c] / counts.max()
        axes[0].scatter(k, c, s=area, c=c, cmap="tab20" if classes > 10 else "tab10")
        axes[0].set(xlim=(-1, clients), ylim=(classes, -1))
    else:
        image = axes[0].imshow(counts.T, aspect="auto", interpolation="nearest", cmap="viridis")
        figure.colorbar(image, ax=axes[0], label="examples")
    many, one = _called(dataset)
    axes[0].set(xlabel="client", ylabel=one)
    if dataset.classes and classes <= 20:
        axes[0].set_yticks(range(classes), dataset.classes, fontsize=7)
    held = (counts > 0).sum(1)
    axes[1].hist(held, bins=np.arange(held.min(), held.max() + 2) - 0.5)
    axes[1].set(xlabel=f"{many} per client", ylabel="clients")
    axes[1].set_title(f"mean {held.mean():.2f}", fontsize=10)
    sizes = counts.sum(1)
    step = max(1, int(np.ptp(sizes)) // 40)
    axes[2].hist(sizes, bins=np.arange(sizes.min(), sizes.max() + step + 1, step) - 0.5)
    axes[2].xaxis.get_major_locator().set_params(integer=True)
    axes[2].set(xlabel="examples per client", ylabel="clients")
    axes[2].set_title(f"mean {sizes.mean():.1f}", fontsize=10)
    return pictures.save(figure, path)


def is_placed(dataset: Dataset) -> bool:
    """Whether labels are positions, of places that are to be recognised."""
    labels = np.asarray(dataset.train.labels)
    return (
        dataset.task == "retrieval" and labels.ndim == 2 and labels.shape[1] == 2
        and labels.dtype.kind == "f"
    )


def draw_map(dataset: Dataset, partition: Partition, path: pathlib.Path) -> pathlib.Path:
    """A map of each city, from its own corner on: where pictures are from, coloured by client.

    Colours are a city's own, and come again after eight clients; nobody's pictures are grey
    crosses.
    """
    positions = np.asarray(dataset.train.labels, np.float64)
    client = np.full(len(positions), -1)
    client[partition.indices] = partition.client_of
    city = _cities(dataset)
    names, counts = np.unique(city, return_counts=True)
    names = np.sort(names[np.argsort(-counts, kind="stable")][:CITIES])
    columns = min(len(names), 4)
    rows = -(-len(names) // columns)
    figure, axes = pictures.new_figure(rows, columns, (3.4 * columns, 3.2 * rows))
    for ax in axes[len(names):]:
        ax.set_visible(False)
    for ax, name in zip(axes, names, strict=False):
        here = city == name
        corner = positions[here].min(0)
        there, of = positions[here] - corner, client[here]
        free, own = of < 0, of >= 0
        ax.scatter(*there[free].T, s=12, c="0.7", marker="x", linewidths=0.7)
        clients, number = np.unique(of[own], return_inverse=True)
        ax.scatter(*there[own].T, s=10, c=COLOURS[number % len(COLOURS)], linewidths=0)
        ax.set(xlabel="m", ylabel="m")
        ax.set_aspect("equal", adjustable="datalim")
        lost = f"\n{free.sum()} of {len(of)} pictures nobody's" if free.any() else ""
        title = f"{pictures.shown(str(name)) or 'all'}: {len(clients)} clients{lost}"
        ax.set_title(title, fontsize=9)
    return pictures.save(figure, path)


def draw_examples(
    dataset: Dataset, partition: Partition, path: pathlib.Path
) -> pathlib.Path | None:
    """Some examples of some clients, a row each; None where examples are no images."""
    shape = dataset.input_shape
    if not isinstance(shape, tuple) or len(shape) != 3 or shape[-1] not in (1, 3):
        return None
    present = np.flatnonzero(partition.sizes)
    chosen = present[np.linspace(0, len(present) - 1, min(SHOWN, len(present))).astype(int)]
    figure, axes = pictures.new_figure(len(chosen), 1, (8, 1.05 * len(chosen)))
    for ax, k in zip(np.ravel(axes), chosen, strict=True):
        own = partition.client(k)
        own = own[np.linspace(0, len(own) - 1, min(SHOWN, len(own))).astype(int)]
        images = np.asarray(dataset.train.inputs[own], np.float32) / dataset.max_value
        strip = np.ones((shape[0], SHOWN * (shape[1] + 2), shape[2]), np.float32)
        for i, image in enumerate(images):
            left = i * (shape[1] + 2)
            strip[:, left : left + shape[1]] = image
        ax.imshow(np.clip(strip.squeeze(), 0, 1), cmap="gray", vmin=0, vmax=1)
        ax.spines[:].set_visible(False)
        ax.set_xticks([])
        ax.set_yticks([])
        name = dataset.clients[k] if len(dataset.clients) == partition.num_clients else str(k)
        ax.set_ylabel(name[:14], rotation=0, ha="right", va="center", fontsize=8)
    return pictures.save(figure, path)


def _cities(dataset: Dataset) -> np.ndarray:
    """The city of every train example."""
    if dataset.owners is None or not dataset.clients:
        return np.full(data_lib.count_of(dataset.train), "")
    return np.array([city_of(name) for name in dataset.clients])[dataset.owners]


def _called(dataset: Dataset) -> tuple[str, str]:
    """What labels are: of several, of one."""
    return ("identities", "identity") if dataset.task == "retrieval" else ("classes", "class")


def _of_labels(dataset: Dataset) -> list[tuple[str, Any]]:
    """Rows on what labels are, and what of the test examples is searched."""
    if dataset.task != "retrieval":
        return [("classes", dataset.num_classes or "-")]
    data_lib.check_places(dataset)
    sizes = [len(dataset.parts[name]) for name in ("database", "queries")]
    kind = "positions, in metres" if is_placed(dataset) else f"{dataset.num_classes} identities"
    return [("labels", kind), ("database, queries", f"{sizes[0]}, {sizes[1]}")]


def _of_cities(dataset: Dataset, partition: Partition) -> list[tuple[str, Any]]:
    """Rows on whose sequences, or other natural clients, and which cities clients have."""
    city, sequence = _cities(dataset), np.asarray(dataset.owners)
    rows: list[tuple[str, Any]] = [("cities", len(np.unique(city)))]
    for what, values in (("cities", city), ("sequences", sequence)):
        own = np.unique(values, return_inverse=True)[1][partition.indices]
        pairs = np.unique(np.stack([partition.client_of, own]), axis=1)[0]
        counts = np.bincount(pairs, minlength=partition.num_clients)
        rows.append((f"{what} per client", _spread(counts)))
    return rows


def _shape(dataset: Dataset) -> str:
    shape = dataset.input_shape
    return "x".join(map(str, shape)) if isinstance(shape, tuple) else str(shape)


def _spread(values: np.ndarray) -> str:
    if not len(values):
        raise errors.UsageError("a partition without a client: there is nothing to show.")
    return f"{values.min()} / {values.mean():.2f} / {values.max()} (min / mean / max)"
