"""Runs side by side: the score over the last rounds, and what it took to reach the first run's.

Rounds to a target score and the communication until then are those of the FedGloSS paper's table
of costs: the target is the first run's score unless one is given, and B what that run sent in all
its rounds. With `smooth`, the curves are first smoothed as Mora (2023) does, s_t = 0.9 s_{t-1} +
0.1 a_t. What a client receives and sends in a round is an average over the run, and in brackets
how many times less than in the first run it is, the compression factor. Seeds of one run are one
row, the mean over them with their deviation (groups.py). The phases of a run are on one axis, their
rounds and bytes counted on; a second table has each.
"""

import numpy as np

from fedjax_flat import errors
from fedjax_flat.report import figures, groups, tables
from fedjax_flat.report.costs import by_phase
from fedjax_flat.run import metrics


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
    found = groups.grouped([_read(run, split) for run in runs])
    first = found[0].runs[0]
    models = [m for m, s in metrics.evaluated(first.records) if s == split]
    model = "personal" if split == "own" and "personal" in models else models[0]
    whole = metrics.bytes_until(first.records)
    if not whole:
        raise errors.UsageError(
            f"{first.path} has no trained round yet, of which the communication would be counted: "
            "train it, or put another run first."
        )
    if target is None:
        target, _, _ = found[0].window_mean(split=split, model=model)
    plain = metrics.bytes_per_client(first.records)
    several, rows = any(len(group.runs) > 1 for group in found), []
    for group in found:
        records = group.runs[0].records
        ways = zip(metrics.bytes_per_client(records), plain, strict=True)
        sent = [f"{tables.bytes_of(n)} ({of / n if n else 1:.3g}x)" for n, of in ways]
        for model in (m for m, s in metrics.evaluated(records) if s == split):
            mean, deviation, _ = group.window_mean(split=split, model=model)
            reached, spent = _until(group, target, whole, smooth=smooth, split=split, model=model)
            seeds = [str(len(group.runs))] * several
            rows.append([group.label, model, *seeds, tables.percent(mean, deviation), reached,
                         spent, *sent])
    to_target = f"rounds to {100 * target:.2f} %"
    score = f"{split} {metrics.written(metrics.score_name(first.records))} (%)"
    header = ["run", "model", *["seeds"] * several, score, to_target, "sent by then", "down", "up"]
    text = tables.table(header, rows, left=(0, 1))
    if several:
        text += "\n± over seeds, where there are several; else over the last rounds."
    if found_phases := by_phase(runs, split):
        text += f"\n\n{found_phases}"
    if figure is not None:
        curves = {group.label: group.records for group in found}
        drawn = figures.score_curves(curves, figure, split=split, alike=alike)
        text += "\n" + tables.named("figure", drawn)
    return text


def _until(group: groups.Group, target: float, whole: float, **selection) -> tuple[str, str]:
    """Rounds and communication to the target; the mean of the seeds that reach it."""
    found = [(r.records, metrics.rounds_to(r.records, target, **selection)) for r in group.runs]
    rounds = [reached for _, reached in found if reached is not None]
    if not rounds:
        return "-", "-"
    sent = [metrics.bytes_until(records, reached) / whole for records, reached in found
            if reached is not None]
    some = "" if len(rounds) == len(found) else f" ({len(rounds)} of {len(found)})"
    return f"{np.mean(rounds):.0f}{some}", f"{np.mean(sent):.2f} B"


def _read(path: str, split: str) -> groups.Run:
    run = groups.read(path)
    evaluated = dict.fromkeys(s for _, s in metrics.evaluated(run.records))
    if split not in evaluated:
        has = f"it has {', '.join(evaluated)}" if evaluated else "it has no evaluations"
        raise errors.UsageError(
            f"{path} is not a run folder with evaluations on the {split} split: {has}. Choose "
            "another with --split."
        )
    return run
