"""Accuracy of trained models on corrupted test images, as in Fig. 4.13 of Caldarola's thesis.

The images are those of CIFAR-10-C and CIFAR-100-C (see data/corruptions), never of a client's own
shift. `mean` is over the corruptions, without the clean images.
"""

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_flat import data as data_lib
from fedjax_flat import errors, progress
from fedjax_flat.data.corruptions import CORRUPTIONS, SEVERITIES, corrupted, folder_of
from fedjax_flat.disk import write_atomically
from fedjax_flat.experiment import config as config_lib
from fedjax_flat.report import groups, pictures, results, tables
from fedjax_flat.run.restore import TrainedRun, load_run
from fedjax_flat.run.run_folder import RunFolder


def robustness(
    runs: Sequence[str],
    *,
    severity: int = 5,
    corruptions: Sequence[str] = tuple(CORRUPTIONS),
    examples: int = 0,
    model: str = "global",
    data_dir: str | None = None,
    cache: str | None = None,
) -> dict[str, Any]:
    """The accuracy of each run's `model` on the first `examples` test images, clean and corrupted.

    Written into the first run's folder, with a figure; `cache` is where images are kept that are
    made here (default: the data folder).
    """
    if severity not in SEVERITIES:
        raise errors.UsageError(f"--severity {severity}: expected 1, 2, 3, 4 or 5.")
    errors.at_least("--examples", examples, 0)
    for name in corruptions:
        errors.lookup("corruption", name, CORRUPTIONS)
    dataset = _dataset_of(runs, data_dir)
    labels = groups.unique_paths(runs)
    trained = dict(zip(labels, (load_run(run, data_dir) for run in runs), strict=True))
    for one in trained.values():
        one.model(model)
    count = min(examples or len(dataset.test.labels), len(dataset.test.labels))
    accuracy: dict[str, dict[str, float]] = {label: {} for label in trained}
    for name in progress.bar(("clean", *corruptions), what="corruptions"):
        if name == "clean":
            seen = data_lib.Examples(dataset.test.inputs[:count], dataset.test.labels[:count])
        else:
            seen = corrupted(
                dataset, name, severity, data_dir=data_lib.data_folder(data_dir),
                cache=pathlib.Path(cache) if cache else None, limit=count,
            )
        for label, one in trained.items():
            accuracy[label][name] = _accuracy(one, model, seen)
    for found in accuracy.values():
        found["mean"] = float(np.mean([found[name] for name in corruptions]))
    result = {
        "runs": [str(run) for run in runs], "model": model, "severity": severity,
        "examples": count, "rounds": [int(one.state.round) for one in trained.values()],
        "accuracy": accuracy,
    }
    of = results.digest([[os.path.abspath(run) for run in runs], result["rounds"], corruptions])
    name = f"{model}_severity{severity}_test{count}_{of}"
    base = RunFolder(runs[0]).path / "robustness" / name
    base.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(base.with_name(base.name + ".json"), json.dumps(result, indent=2) + "\n")
    figure = draw(accuracy, base.with_name(base.name + ".png"), severity=severity)
    return result | {"figure": str(figure)}


def table(result: dict[str, Any]) -> str:
    """Corruptions down, runs across, in percent."""
    accuracy = result["accuracy"]
    names = list(next(iter(accuracy.values())))
    rows = [[name, *(f"{100 * found[name]:.2f}" for found in accuracy.values())] for name in names]
    return tables.table([f"accuracy (%), severity {result['severity']}", *accuracy], rows)


def draw(accuracy: dict[str, dict[str, float]], path: pathlib.Path, *, severity: int):
    """A bar for every run and corruption."""
    names = list(next(iter(accuracy.values())))
    figure, (axes,) = pictures.new_figure(1, 1, (1.5 + 0.5 * len(names), 3.8))
    width = 0.8 / len(accuracy)
    for i, (label, found) in enumerate(accuracy.items()):
        places = np.arange(len(names)) + (i - (len(accuracy) - 1) / 2) * width
        heights = [100 * found[n] for n in names]
        axes.bar(places, heights, width, color=f"C{i}", label=pictures.shown(label))
    words = [name.replace("_", " ") for name in names]
    axes.set_xticks(range(len(names)), words, rotation=45, ha="right")
    axes.set(ylabel=f"test accuracy (%), severity {severity}", ylim=(0, None))
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    return pictures.save(figure, path)


def _accuracy(trained: TrainedRun, model: str, examples: data_lib.Examples) -> float:
    built = trained.experiment
    on_device = built.over.replicate(data_lib.on_device(examples))
    means = built.task.means(built.evaluate(trained.model(model), on_device))
    return float(means["accuracy"])


def _dataset_of(runs: Sequence[str], data_dir: str | None) -> data_lib.Dataset:
    """The one data set that all runs were trained on."""
    chosen = {}
    for run in runs:
        config = RunFolder(run).config()
        try:
            folder_of(config.data.name)
        except errors.UsageError as e:
            raise errors.UsageError(f"{run} was trained on {config.data.name}: {e}") from e
        if config.data.features:
            raise errors.UsageError(
                f"{run} was trained on features (data.features), and corruptions are of images: "
                "expected a run whose model is the whole network."
            )
        source = data_lib.SOURCES.find(config.data.name)
        chosen[run] = (config.data.name, config_lib.options_of(config, "data", source))
    name, options = chosen[runs[0]]
    for run, other in chosen.items():
        if other != (name, options):
            raise errors.UsageError(
                f"{runs[0]} was trained on {name} {options or ''}, {run} on {other[0]} "
                f"{other[1] or ''}: expected runs on one data set. Ask for each by itself."
            )
    return data_lib.load(name, data_dir, **options)
