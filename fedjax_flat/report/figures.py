"""Pictures of runs."""

import os
import pathlib
from collections.abc import Mapping

import numpy as np

from fedjax_flat.engine import metrics


def accuracy_curves(
    runs: Mapping[str, list[dict]], path: str | os.PathLike, *, split: str = "test"
) -> pathlib.Path:
    """Accuracy by round and what clients saw while training, one colour per run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    accuracy, drift = figure.subplots(1, 2)
    for i, (label, records) in enumerate(runs.items()):
        models = dict.fromkeys(r["model"] for r in records if r["split"] == split)
        for style, model in zip(("-", "--", ":", "-."), models, strict=False):
            rounds, values = metrics.curve(records, split=split, model=model)
            name = label if model == "global" else f"{label} ({model})"
            accuracy.plot(rounds, 100 * values, style, color=f"C{i}", label=name, linewidth=1.5)
        rounds, values = metrics.curve(records, split="cohort", model="local", name="drift")
        drift.plot(rounds, values, color=f"C{i}", linewidth=0.5, alpha=0.35)
        drift.plot(rounds, _smooth(values), color=f"C{i}", label=label, linewidth=1.5)
    accuracy.set(xlabel="round", ylabel=f"{split} accuracy (%)", ylim=(0, 100))
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


def _smooth(values: np.ndarray, width: int = 9) -> np.ndarray:
    """Running mean with a window that shrinks at the ends."""
    width = min(width, len(values))
    if width < 2:
        return values
    ones = np.ones(width)
    return np.convolve(values, ones, "same") / np.convolve(np.ones(len(values)), ones, "same")
