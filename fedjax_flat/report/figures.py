"""Pictures of runs."""

import os
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from fedjax_flat.landscape import Grid
from fedjax_flat.report import pictures
from fedjax_flat.run import metrics

Runs = Mapping[str, Sequence[list[dict]]]
STYLES = ("-", "--", ":", "-.")


def score_curves(
    runs: Runs, path: str | os.PathLike, *, split: str = "test", alike: int = 1
) -> pathlib.Path:
    """The score and client drift by round: a colour per label, its runs' mean and deviation.

    `alike` labels after one another share a colour, and have lines of their own.
    If the runs, or a run's phases, do not all send as much, the score by what was sent too.
    """
    sent = {round(sum(metrics.bytes_per_client(seeds[0]))) for seeds in runs.values()}
    in_phases = any(metrics.phase_ends(seeds[0]) for seeds in runs.values())
    panels = 3 if len(sent) > 1 or in_phases else 2
    figure, (accuracy, *by_bytes, drift) = pictures.new_figure(1, panels, (4.5 * panels, 3.4))
    draw_score(accuracy, runs, split, alike=alike)
    for axes in by_bytes:
        draw_score(axes, runs, split, by_bytes=True, alike=alike)
        axes.get_legend().remove()
    for i, (label, seeds) in enumerate(runs.items()):
        rounds, mean, _ = _mean_curve(seeds, split="cohort", model="local", name="drift")
        color, style = f"C{i // alike}", STYLES[i % alike]
        drift.plot(rounds, mean, color=color, linewidth=0.5, alpha=0.35)
        drift.plot(rounds, _smooth(mean), style, color=color, label=label, linewidth=1.5)
    drift.set(xlabel="round", ylabel=r"client drift $\|w_k - w\|$", ylim=(0, None))
    drift.grid(alpha=0.25)
    if len(runs) <= 4:
        drift.legend(frameon=False)
    else:  # too many for the corners
        figure.legend(
            *accuracy.get_legend_handles_labels(), loc="outside lower center", ncols=4,
            frameon=False,
        )
        accuracy.get_legend().remove()
    return pictures.save(figure, path)


def curvature_curves(records: list[dict], path: str | os.PathLike) -> pathlib.Path:
    """lambda_1 by round: the models on the train split, each client's on its own and all data."""
    found = [r for r in records if "lambda_1" in r]
    names = dict.fromkeys((r["model"], r["split"]) for r in found)
    clients = [(m, s) for m, s in names if m.startswith("client ")]
    panels = ["train", "own"] if clients else ["train"]
    figure, axes = pictures.new_figure(1, len(panels), (4.5 * len(panels), 3.4))
    titles = {"train": "on all clients' data", "own": "on each client's own data"}
    for ax, panel in zip(axes, panels, strict=True):
        for i, (model, split) in enumerate((m, s) for m, s in clients if s == panel):
            rounds, values = metrics.curve(found, split=split, model=model, name="lambda_1")
            shade = i / max(1, len(clients) / 2 - 1)
            ax.plot(rounds, values, color=pictures.shade(shade), linewidth=0.8, alpha=0.7,
                    label="local models" if i == 0 else None)
        for i, model in enumerate(m for m, s in names if s == panel and (m, s) not in clients):
            rounds, values = metrics.curve(found, split=panel, model=model, name="lambda_1")
            ax.plot(rounds, values, color=f"C{i}", linewidth=2, label=model)
        ax.set(xlabel="round", ylabel=r"$\lambda_1$")
        ax.set_title(titles[panel], fontsize=10)
        ax.grid(alpha=0.25)
        ax.legend(frameon=False)
    return pictures.save(figure, path)


def overview(
    runs: Runs,
    eigenvalues: Mapping[str, np.ndarray],
    surfaces: Mapping[str, Grid],
    path: str | os.PathLike,
) -> pathlib.Path:
    """Accuracy, top eigenvalues and loss surfaces of several methods in one figure."""
    figure = pictures.empty_figure((3.1 * len(surfaces), 6.4))
    top, bottom = figure.subfigures(2, 1, height_ratios=(1, 1.1))
    accuracy, spectrum = top.subplots(1, 2)
    draw_score(accuracy, runs, "test")
    width = 0.8 / len(eigenvalues)
    for i, (label, values) in enumerate(eigenvalues.items()):
        ranks = np.arange(1, len(values) + 1) + (i - (len(eigenvalues) - 1) / 2) * width
        spectrum.bar(ranks, values, width, color=f"C{i}", label=label)
    spectrum.set(xlabel="rank", ylabel="Hessian eigenvalue")
    spectrum.legend(frameon=False)
    for axes in (accuracy, spectrum):
        axes.spines[["top", "right"]].set_visible(False)
    pictures.draw_surfaces(
        bottom.subplots(1, len(surfaces), subplot_kw={"projection": "3d"}), surfaces
    )
    return pictures.save(figure, path)


def draw_score(
    axes, runs: Runs, split: str, *, by_bytes: bool = False, alike: int = 1
) -> None:
    """Curves of every model on a split, by round or by what all clients received and sent."""
    lowest = 100.0
    for i, (label, seeds) in enumerate(runs.items()):
        models = [m for m, s in metrics.evaluated(seeds[0]) if s == split]
        color, styles = f"C{i // alike}", STYLES[i % alike:]
        for style, model in zip(styles, models, strict=False):
            rounds, mean, deviation = _mean_curve(seeds, split=split, model=model)
            late = rounds >= rounds.max() / 4
            if by_bytes:
                rounds = np.array([metrics.bytes_until(seeds[0], t) for t in rounds]) / 1e6
                rounds[rounds == 0] = np.nan  # it is a logarithmic axis
            name = f"{label} ({model})" if len(models) > 1 and model != "global" else label
            mean, deviation = 100 * mean, 100 * deviation
            axes.plot(rounds, mean, style, color=color, label=name, linewidth=1.5)
            axes.fill_between(
                rounds, mean - deviation, mean + deviation, color=color, alpha=0.15, linewidth=0
            )
            lowest = min(lowest, *mean[late])  # the first rounds hide all
        _draw_phases(axes, seeds[0], color, by_bytes=by_bytes, names=len(runs) == 1)
    score = metrics.score_name(next(iter(runs.values()))[0])
    by = "megabytes sent" if by_bytes else "round"
    axes.set(xlabel=by, ylabel=f"{split} {score} (%)", ylim=(0.95 * lowest, None))
    if by_bytes:
        axes.set_xscale("log")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def _draw_phases(axes, records, color: str, *, by_bytes: bool, names: bool) -> None:
    """A dotted line where a phase ends and the next begins; names, where they would not overlap."""
    begin = 0
    for phase, end in metrics.phase_ends(records).items():
        if begin:
            x = metrics.bytes_until(records, begin) / 1e6 if by_bytes else begin
            axes.axvline(x, color=color, linestyle=":", linewidth=1)
        if names and not by_bytes:
            axes.text((begin + end) / 2, 1.0, phase, transform=axes.get_xaxis_transform(),
                      ha="center", va="bottom", fontsize=8)
        begin = end


def _mean_curve(seeds: Sequence[list[dict]], **selection):
    """(rounds, mean, deviation) over runs, of the rounds that all of them have."""
    curves = [dict(zip(*metrics.curve(records, **selection), strict=True)) for records in seeds]
    rounds = [t for t in curves[0] if all(t in other for other in curves)]
    values = np.array([[curve[t] for t in rounds] for curve in curves])
    return np.array(rounds), values.mean(axis=0), values.std(axis=0)


def _smooth(values: np.ndarray, width: int = 9) -> np.ndarray:
    """Running mean with a window that shrinks at the ends."""
    width = min(width, len(values))
    if width < 2:
        return values
    ones = np.ones(width)
    return np.convolve(values, ones, "same") / np.convolve(np.ones(len(values)), ones, "same")
