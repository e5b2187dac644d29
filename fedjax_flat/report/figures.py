"""Pictures of runs."""

import os
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from fedjax_flat.engine import metrics


def accuracy_curves(
    runs: Mapping[str, Sequence[list[dict]]], path: str | os.PathLike, *, split: str = "test"
) -> pathlib.Path:
    """Accuracy and client drift by round: a colour per label, its runs' mean and deviation."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    accuracy, drift = figure.subplots(1, 2)
    lowest = 100.0
    for i, (label, seeds) in enumerate(runs.items()):
        models = dict.fromkeys(r["model"] for r in seeds[0] if r["split"] == split)
        for style, model in zip(("-", "--", ":", "-."), models, strict=False):
            rounds, mean, deviation = _mean_curve(seeds, split=split, model=model)
            name = f"{label} ({model})" if len(models) > 1 and model != "global" else label
            mean, deviation = 100 * mean, 100 * deviation
            accuracy.plot(rounds, mean, style, color=f"C{i}", label=name, linewidth=1.5)
            accuracy.fill_between(
                rounds, mean - deviation, mean + deviation, color=f"C{i}", alpha=0.15, linewidth=0
            )
            lowest = min(lowest, *mean[rounds >= rounds.max() / 4])  # the first rounds hide all
        rounds, mean, _ = _mean_curve(seeds, split="cohort", model="local", name="drift")
        drift.plot(rounds, mean, color=f"C{i}", linewidth=0.5, alpha=0.35)
        drift.plot(rounds, _smooth(mean), color=f"C{i}", label=label, linewidth=1.5)
    accuracy.set(xlabel="round", ylabel=f"{split} accuracy (%)", ylim=(0.95 * lowest, None))
    drift.set(xlabel="round", ylabel=r"client drift $\|w_k - w\|$", ylim=(0, None))
    for axes in (accuracy, drift):
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial-{path.name}")
    figure.savefig(partial, dpi=150)
    os.replace(partial, path)
    return path


def _mean_curve(seeds: Sequence[list[dict]], **selection):
    """(rounds, mean, deviation) over runs of the same length."""
    curves = [metrics.curve(records, **selection) for records in seeds]
    values = np.array([values for _, values in curves])
    return curves[0][0], values.mean(axis=0), values.std(axis=0)


def _smooth(values: np.ndarray, width: int = 9) -> np.ndarray:
    """Running mean with a window that shrinks at the ends."""
    width = min(width, len(values))
    if width < 2:
        return values
    ones = np.ones(width)
    return np.convolve(values, ones, "same") / np.convolve(np.ones(len(values)), ones, "same")
