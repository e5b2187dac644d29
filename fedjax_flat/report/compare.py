"""Runs side by side: the score over the last rounds, and what it took to reach the first run's.

Rounds to a target score and the communication until then are those of the FedGloSS paper's table
of costs: the target is the first run's score unless one is given, and B what that run sent in all
its rounds. With `smooth`, the curves are first smoothed as Mora (2023) does, s_t = 0.9 s_{t-1} +
0.1 a_t. What a client receives and sends in a round is an average over the run, and in brackets
how many times less than in the first run it is, the compression factor. The phases of a run are on
one axis, their rounds and bytes counted on; a second table has each.
"""

import pathlib
from typing import Any

from fedjax_flat import errors
from fedjax_flat.report import figures, pictures, tables
from fedjax_flat.report.costs import by_phase
from fedjax_flat.run import metrics, phases
from fedjax_flat.run.run_folder import RunFolder


def compare(
    runs: list[str],
    figure: str | None = None,
    split: str = "test",
    *,
    target: float | None = None,
    smooth: float = 0.0,
    alike: int = 1,
) -> str:
    """A table of run folders on a split; the curves too, if `figure` names a file.

    There, `alike` runs after one another share a colour.
    """
    errors.below_one("--smooth", smooth)
    if not 1 <= alike <= len(figures.STYLES):
        raise errors.UsageError(f"--alike {alike}: expected 1 to {len(figures.STYLES)}.")
    if alike > 1 and figure is None:
        raise errors.UsageError(f"--alike {alike} would change nothing: it is of --figure.")
    if target is not None:
        errors.finite("--target", target)
    records = {run: _read(run, split) for run in runs}
    window = {run: (RunFolder(run).phases or [RunFolder(run)])[-1].config().eval.window
              for run in runs}
    first = runs[0]
    model = "personal" if split == "own" else "global"
    if target is None:
        target, _, _ = metrics.window_mean(records[first], window[first], split=split, model=model)
    whole = metrics.bytes_until(records[first])
    if not whole:
        raise errors.UsageError(
            f"{first} has no trained round yet, of which the communication would be counted: train "
            "it, or put another run first."
        )
    plain = metrics.bytes_per_client(records[first])
    rows = []
    for run, found in records.items():
        models = dict.fromkeys(r["model"] for r in found if r["split"] == split)
        ways = zip(metrics.bytes_per_client(found), plain, strict=True)
        sent = [f"{tables.bytes_of(n)} ({of / n if n else 1:.3g}x)" for n, of in ways]
        for model in models:
            mean, deviation, _ = metrics.window_mean(found, window[run], split=split, model=model)
            reached = metrics.rounds_to(
                found, target, smooth=smooth, split=split, model=model
            )
            spent = metrics.bytes_until(found, reached) / whole if reached is not None else None
            rows.append(
                [
                    pathlib.Path(run).name,
                    model,
                    tables.percent(mean, deviation),
                    "-" if reached is None else str(reached),
                    "-" if spent is None else f"{spent:.2f} B",
                    *sent,
                ]
            )
    to_target = f"rounds to {100 * target:.2f} %"
    score = metrics.score_name(records[first])
    header = ["run", "model", f"{split} {score} (%)", to_target, "sent by then", "down", "up"]
    text = tables.table(header, rows, left=(0, 1))
    if found_phases := by_phase(runs, split):
        text += f"\n\n{found_phases}"
    if figure is not None:
        curves = {pictures.label(run): [found] for run, found in records.items()}
        drawn = figures.score_curves(curves, figure, split=split, alike=alike)
        text += "\n" + tables.named("figure", drawn)
    return text


def _read(run: str, split: str) -> list[dict[str, Any]]:
    records = phases.records(RunFolder(run))
    evaluated = dict.fromkeys(r["split"] for r in records if r["split"] != "cohort")
    if split not in evaluated:
        has = f"it has {', '.join(evaluated)}" if evaluated else "it has no evaluations"
        raise errors.UsageError(
            f"{run} is not a run folder with evaluations on the {split} split: {has}. Choose "
            "another with --split."
        )
    return records
