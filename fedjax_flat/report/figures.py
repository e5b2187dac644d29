"""Pictures of runs."""

import os
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from fedjax_flat.landscape import Grid
from fedjax_flat.report import curves, pictures
from fedjax_flat.run import metrics

Runs = Mapping[str, Sequence[list[dict]]]
STYLES = ("-", "--", ":", "-.")


def score_curves(
    runs: Runs, path: str | os.PathLike, *, split: str = "test", alike: int = 1
) -> pathlib.Path:
    """The score and client drift by round: a colour per label, its runs' mean and deviation.

    `alike` labels after one another share a colour, and have lines of their own.
    If the runs, or a run's phases, do not all send as much, the score by what was sent too; if
    there is a clock, by its seconds.
    """
    sent = {round(sum(metrics.bytes_per_client(seeds[0]))) for seeds in runs.values()}
    in_phases = any(metrics.phase_ends(seeds[0]) for seeds in runs.values())
    timed = any(metrics.running(seeds[0], "seconds") for seeds in runs.values())
    by = [*["bytes"] * (len(sent) > 1 or in_phases), *["seconds"] * timed]
    panels = 2 + len(by)
    figure, (accuracy, *others, drift) = pictures.new_figure(1, panels, (4.5 * panels, 3.4))
    draw_score(accuracy, runs, split, alike=alike)
    for axes, axis in zip(others, by, strict=True):
        draw_score(axes, runs, split, by=axis, alike=alike)
    for i, seeds in enumerate(runs.values()):
        rounds, mean, _ = curves.mean_curve(seeds, split="cohort", model="local", name="drift")
        color, style = f"C{i // alike}", STYLES[i % alike]
        drift.plot(rounds, mean, color=color, linewidth=0.5, alpha=0.35)
        drift.plot(rounds, curves.smooth(mean), style, color=color, linewidth=1.5)
    drift.set(xlabel="round", ylabel=r"client drift $\|w_k - w\|$", ylim=(0, None))
    drift.grid(alpha=0.25)
    pictures.legend_below(figure, accuracy, 4)
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
    pictures.legend_below(figure, axes[0], 3)
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
    pictures.legend_below(top, accuracy, 4)
    for axes in (accuracy, spectrum):
        axes.spines[["top", "right"]].set_visible(False)
    pictures.draw_surfaces(
        bottom, bottom.subplots(1, len(surfaces), subplot_kw={"projection": "3d"}), surfaces
    )
    return pictures.save(figure, path)


def draw_score(
    axes, runs: Runs, split: str, *, by: str = "round", alike: int = 1
) -> None:
    """Curves of every model on a split, by round or another of `curves.AXES`."""
    lowest = 100.0
    for i, (label, seeds) in enumerate(runs.items()):
        models = [m for m, s in metrics.evaluated(seeds[0]) if s == split]
        color, styles = f"C{i // alike}", STYLES[i % alike:]
        for style, model in zip(styles, models, strict=False):
            rounds, mean, deviation = curves.mean_curve(seeds, split=split, model=model)
            x = curves.along(seeds, by, rounds)
            if x is None or not len(x):
                continue
            name = pictures.shown(label)
            if len(models) > 1 and model != "global":
                name += f" ({model})"
            mean, deviation = 100 * mean, 100 * deviation
            late = rounds >= rounds.max() / 4
            if by == "bytes":
                x = np.where(x == 0, np.nan, x)  # it is a logarithmic axis
            axes.plot(x, mean, style, color=color, label=name, linewidth=1.5)
            axes.fill_between(
                x, mean - deviation, mean + deviation, color=color, alpha=0.15, linewidth=0
            )
            lowest = min(lowest, *mean[late])  # the first rounds hide all
        _draw_phases(axes, seeds, color, by=by, names=len(runs) == 1)
    score = metrics.written(metrics.score_name(next(iter(runs.values()))[0]))
    axes.set(xlabel=curves.AXES[by], ylabel=f"{split} {score} (%)", ylim=(0.95 * lowest, None))
    if by == "bytes":
        axes.set_xscale("log")
    axes.grid(alpha=0.25)


def _draw_phases(axes, seeds, color: str, *, by: str, names: bool) -> None:
    """A dotted line where a phase ends and the next begins; names, where they would not overlap."""
    begin = 0
    for phase, end in metrics.phase_ends(seeds[0]).items():
        where = curves.along(seeds, by, np.array([begin]))
        if begin and where is not None:
            axes.axvline(where[0], color=color, linestyle=":", linewidth=1)
        if names and by == "round":
            axes.text((begin + end) / 2, 1.0, phase, transform=axes.get_xaxis_transform(),
                      ha="center", va="bottom", fontsize=8)
        begin = end
