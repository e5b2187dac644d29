"""What a search finds: queries with the nearest images of the database, and recall@n by n.

Of the split `test`, as the run evaluates it: queries in the database, or every image among all
others. A frame that is green and whole is right, one that is red and dashed wrong.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_flat import data as data_lib
from fedjax_flat import errors
from fedjax_flat.disk import write_atomically
from fedjax_flat.experiment import config as config_lib
from fedjax_flat.report import groups, pictures, tables
from fedjax_flat.run.restore import TrainedRun, load_run
from fedjax_flat.tasks import nearest, relation_of
from fedjax_flat.tasks.search import RANKS, asked

SHOWN, MOST = 5, 25  # images found for a query, and the largest n of a curve
RIGHT, WRONG = "#1a9641", "#d7191c"


def retrieve(
    runs: Sequence[str], *, queries: int = 5, model: str = "global", data_dir: str | None = None
) -> dict[str, Any]:
    """Recall of every run's `model`, with two figures in the first run's folder."""
    errors.at_least("--queries", queries, 1)
    trained = dict(zip(
        groups.unique_paths(runs), (load_run(run, data_dir) for run in runs), strict=True
    ))
    curves, first = {}, None
    for label, one in trained.items():
        if one.experiment.task.search is None:
            raise errors.UsageError(
                f"{label} was trained for {one.experiment.task.score}, not to search images: "
                "expected a run of task retrieval, e.g. configs/fedvpr.py."
            )
        found = _search(one, model)
        curves[label] = found["curve"]
        first = first or (one, found)
    assert first
    one, found = first
    folder = one.folder.path / "retrieval"
    folder.mkdir(parents=True, exist_ok=True)
    figures = [
        draw(one, found, queries, folder / f"{model}_nearest.png", data_dir),
        draw_curves(curves, folder / f"{model}_recall.png"),
    ]
    recalls = {label: [round(float(x), 6) for x in curve] for label, curve in curves.items()}
    write_atomically(folder / f"{model}.json", json.dumps(
        {"model": model, "queries": len(found["right"]), "recall": recalls}, indent=2
    ) + "\n")
    return {"model": model, "recall": recalls, "figures": [str(path) for path in figures]}


def table(result: dict[str, Any]) -> str:
    """Runs down, recall@1, 5 and 10 across, in percent; of fewer images the last there is."""
    rows = [[label, *(f"{100 * curve[min(n, len(curve)) - 1]:.2f}" for n in RANKS)]
            for label, curve in result["recall"].items()]
    return tables.table([f"{result['model']} (%)", *(f"recall@{n}" for n in RANKS)], rows)


def _search(trained: TrainedRun, model: str) -> dict[str, Any]:
    """The nearest of every query, which of them are right, and the curve."""
    built = trained.experiment
    if "test" not in built.splits:
        raise errors.UsageError(
            f"{trained.folder.path} does not evaluate test: expected it in eval.splits."
        )
    examples = built.splits["test"]
    labels = jax.device_get(examples.labels)
    queries, database, same = asked(labels)
    plain = np.asarray(getattr(labels, "labels", labels))
    task = built.config.task
    relation = relation_of(task.radius, task.negative_radius)
    if same:
        queries = queries[relation.paired(plain)]
    f = embeddings(trained, model, examples)
    places, _ = nearest(f[queries], f[database], MOST, queries if same else None)
    right = np.asarray(relation.right(plain[queries], plain[database][places])) & (places >= 0)
    curve = np.maximum.accumulate(right, axis=1).mean(axis=0)
    return {"queries": queries, "places": database[places], "right": right, "labels": plain,
            "curve": curve}


def embeddings(trained: TrainedRun, model: str, examples: data_lib.Examples) -> jax.Array:
    """Of all these examples, in batches of one size."""
    built, count = trained.experiment, data_lib.count_of(examples)
    size = min(built.config.eval.batch_size, count)
    found = [
        built.predict(trained.model(model), examples,
                      np.minimum(np.arange(start, start + size), count - 1))
        for start in range(0, count, size)
    ]
    return jnp.concatenate(found)[:count]


def draw(
    trained: TrainedRun, found: dict[str, Any], count: int, path: pathlib.Path,
    data_dir: str | None,
) -> pathlib.Path:
    """A row for each of `count` queries, evenly spaced: the query, then what was found."""
    config = trained.experiment.config
    options = config_lib.options_of(config, "data", data_lib.SOURCES.find(config.data.name))
    dataset = data_lib.load(config.data.name, data_dir, **options)
    images = trained.experiment.splits["test"].inputs
    chosen = np.linspace(0, len(found["queries"]) - 1, min(count, len(found["queries"])))
    chosen = np.unique(chosen.round().astype(int))
    shown = min(SHOWN, found["places"].shape[1])
    height, width = images.shape[1:3]
    size = (1.5 * (shown + 1), len(chosen) * (1.5 * height / width + 0.3) + 0.4)
    figure, axes = pictures.new_figure(len(chosen), shown + 1, size)
    for row, q in zip(np.reshape(axes, (len(chosen), shown + 1)), chosen, strict=True):
        asked_for = found["queries"][q]
        _show(row[0], images[asked_for], dataset.max_value)
        row[0].set_title(f"query {asked_for}", fontsize=8)
        for n, ax in enumerate(row[1:]):
            place, right = found["places"][q, n], found["right"][q, n]
            _show(ax, images[place], dataset.max_value)
            _frame(ax, right)
            said = "right" if right else "wrong"
            labels = found["labels"]
            if labels.ndim == 2:
                said += f", {np.linalg.norm(labels[place] - labels[asked_for]):.0f} m"
            ax.set_title(said, fontsize=8, color=RIGHT if right else WRONG)
    figure.suptitle(
        f"{pictures.label(trained.folder.path)}: queries and the {shown} nearest images, best "
        f"first; recall@1 {100 * found['curve'][0]:.1f} %", fontsize=9,
    )
    return pictures.save(figure, path)


def _show(ax, image: Any, largest: float) -> None:
    image = np.clip(np.asarray(image, np.float32) / largest, 0, 1)
    if image.shape[-1] != 3:  # whatever the channels are: as grey
        image = image.mean(-1, keepdims=True).repeat(3, -1)
    ax.imshow(image, interpolation="nearest")
    ax.set(xticks=[], yticks=[])
    for spine in ax.spines.values():
        spine.set_visible(False)


def _frame(ax, right: bool) -> None:
    for spine in ax.spines.values():
        spine.set(visible=True, color=RIGHT if right else WRONG, linewidth=2.5,
                  linestyle="-" if right else (0, (2, 1)))


def draw_curves(curves: dict[str, np.ndarray], path: pathlib.Path) -> pathlib.Path:
    """recall@n of every run."""
    figure, (axes,) = pictures.new_figure(1, 1, (5.0, 3.6))
    for label, curve in curves.items():
        axes.plot(np.arange(1, len(curve) + 1), 100 * curve, marker="o", markersize=3,
                  label=pictures.label(label))
    axes.set(xlabel="n: nearest images looked at", ylabel="recall@n (%)", ylim=(0, 101))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.25)
    pictures.legend_below(figure, axes, 2)
    return pictures.save(figure, path)
