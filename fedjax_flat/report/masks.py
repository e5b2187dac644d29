"""What a segmentation model sees: predicted labels beside the truth, and the IoU of every class.

Labels are drawn in the data set's colours; pixels that count nowhere are black in the truth. The
IoU is that of each split that the run evaluates, seen and unseen domains say, with BatchNorm's
statistics as the run evaluates (eval.statistics); a class that a split lacks has none.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_flat import data as data_lib
from fedjax_flat import errors
from fedjax_flat.disk import write_atomically
from fedjax_flat.experiment import config as config_lib
from fedjax_flat.report import pictures, tables
from fedjax_flat.run.restore import TrainedRun, load_run


def masks(
    run: str,
    *,
    split: str = "",
    model: str = "global",
    examples: int = 6,
    data_dir: str | None = None,
) -> dict[str, Any]:
    """IoU by split and class, and two figures in the run's folder; `split` is whose are drawn."""
    errors.at_least("--examples", examples, 1)
    trained = load_run(run, data_dir)
    config = trained.experiment.config
    source = data_lib.SOURCES.find(config.data.name)
    dataset = data_lib.load(
        config.data.name, data_dir, **config_lib.options_of(config, "data", source)
    )
    if dataset.task != "segmentation":
        raise errors.UsageError(
            f"{run} was trained on {config.data.name}, which is for {dataset.task}: expected a run "
            "on labels of pixels, e.g. configs/feddrive.py."
        )
    variables, built = trained.model(model, clusters=True), trained.experiment
    scores = {}
    for name, own in built.splits.items():
        sums = built.evaluate(variables, own)
        scores[name] = {
            "miou": float(built.task.means(sums)["miou"]),
            "classes": _ious(np.asarray(sums["confusion"])),
        }
    split = split or list(built.splits)[-1]
    folder = trained.folder.path / "masks"
    folder.mkdir(parents=True, exist_ok=True)
    done = int(trained.state.round)
    name = f"{model}_round{done}"
    figures = [
        draw(trained, dataset, split, model, examples, folder / f"{name}_{split}{examples}.png"),
        bars(scores, dataset, folder / f"{name}_classes.png"),
    ]
    result = {
        "run": str(run), "model": model, "round": done, "classes": list(names_of(dataset)),
        "scores": scores,
    }
    write_atomically(folder / f"{name}.json", json.dumps(result, indent=2) + "\n")
    return result | {"figures": [str(path) for path in figures]}


def table(result: dict[str, Any]) -> str:
    """Classes down, splits across, in percent."""
    scores = result["scores"]
    show = lambda value: "-" if value is None else f"{100 * value:.2f}"
    rows = [[name, *(show(s["classes"][c]) for s in scores.values())]
            for c, name in enumerate(result["classes"])]
    rows.append(["mIoU", *(show(s["miou"]) for s in scores.values())])
    return tables.table([f"IoU (%), {result['model']}, round {result['round']}", *scores], rows)


def of_records(records: Sequence[dict[str, Any]]) -> str:
    """The last IoU of every class that a run's metrics have, models and splits across; '' if none.

    A class that a split lacks is 0 there.
    """
    last = {
        f"{r['model']} {r['split']}": r for r in records
        if r["split"] != "cohort" and any(name.startswith("iou.") for name in r)
    }
    if not last:
        return ""
    names = [name for name in next(iter(last.values())) if name.startswith("iou.")]
    rows = [[name.removeprefix("iou."), *(f"{100 * r[name]:.2f}" for r in last.values())]
            for name in names]
    return tables.table(["IoU (%)", *last], rows)


def names_of(dataset: data_lib.Dataset) -> tuple[str, ...]:
    """Of the classes."""
    return dataset.classes or tuple(map(str, range(dataset.num_classes)))


def coloured(labels: np.ndarray, dataset: data_lib.Dataset) -> np.ndarray:
    """Labels as a picture, (height, width, 3) of bytes; black where there is no class."""
    table = np.zeros((256, 3), np.uint8)
    table[: dataset.num_classes] = colours_of(dataset)
    known = (labels >= 0) & (labels < dataset.num_classes)
    return table[np.where(known, labels, 255)]


def colours_of(dataset: data_lib.Dataset) -> np.ndarray:
    """The data set's own, or as many that are far apart."""
    if dataset.colours:
        return np.array(dataset.colours, np.uint8)
    from matplotlib import colormaps

    hues = colormaps["turbo"](np.linspace(0.05, 0.95, dataset.num_classes))
    return np.round(255 * hues[:, :3]).astype(np.uint8)


def draw(
    trained: TrainedRun, dataset: data_lib.Dataset, split: str, model: str, count: int,
    path: pathlib.Path,
) -> pathlib.Path:
    """A row of image, truth and prediction for each of `count` images, evenly spaced."""
    from matplotlib.patches import Patch

    own = trained.experiment.split(split)
    everything = data_lib.count_of(own)
    chosen = np.linspace(0, everything - 1, min(count, everything)).round().astype(int)
    logits = trained.experiment.predict(trained.model(model, clusters=True), own, chosen)
    guesses = np.asarray(logits).argmax(-1)
    height, width = guesses.shape[1:]
    size = (9.0, 3.0 * len(chosen) * height / width + 0.9)
    figure, axes = pictures.new_figure(len(chosen), 3, size)
    grid = np.reshape(axes, (len(chosen), 3))
    for row, i, guess in zip(grid, chosen, guesses, strict=True):
        image = np.clip(np.asarray(own.inputs[i], np.float32) / dataset.max_value, 0, 1)
        if image.shape[-1] != 3:  # whatever the channels are: as grey
            image = image.mean(-1, keepdims=True).repeat(3, -1)
        shown = (image, coloured(np.asarray(own.labels[i]), dataset),
                 coloured(guess, dataset))
        for ax, picture in zip(row, shown, strict=True):
            ax.imshow(picture, interpolation="nearest")
            ax.set_axis_off()
    for ax, title in zip(grid[0], (f"{split}", "truth", "predicted"), strict=True):
        ax.set_title(title, fontsize=10)
    handles = [Patch(color=colour / 255, label=name)
               for colour, name in zip(colours_of(dataset), names_of(dataset), strict=True)]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    return pictures.save(figure, path)


def bars(
    scores: dict[str, dict[str, Any]], dataset: data_lib.Dataset, path: pathlib.Path
) -> pathlib.Path:
    """A bar for every class and split, in the class's colour; splits differ in their hatching."""
    names, colours = names_of(dataset), colours_of(dataset) / 255
    figure, (axes,) = pictures.new_figure(1, 1, (2.0 + 0.6 * len(names), 3.6))
    width = 0.85 / len(scores)
    hatches = ("", "//", "..", "xx", "\\\\", "++")
    for i, (split, found) in enumerate(scores.items()):
        places = np.arange(len(names)) + (i - (len(scores) - 1) / 2) * width
        values = [100 * (x or 0.0) for x in found["classes"]]
        axes.bar(places, values, width, color=colours, edgecolor="white", linewidth=0.5,
                 hatch=hatches[i % len(hatches)], label=f"{split}, mIoU {100 * found['miou']:.1f}")
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set(ylabel="IoU (%)", ylim=(0, 100))
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return pictures.save(figure, path)


def _ious(confusion: np.ndarray) -> list[float | None]:
    """Of every class; None for one that neither truth nor prediction has."""
    hit = np.diag(confusion)
    union = confusion.sum(0) + confusion.sum(1) - hit
    return [float(h / u) if u else None for h, u in zip(hit, union, strict=True)]
