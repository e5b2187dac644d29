"""What runs needed to reach a score, and in all: tables 3.7 and 4.7 to 4.10 of Fani's thesis.

Bytes are of all clients, down and up, and FLOPs (multiply-adds by formula, experiment/costs.py) the
mean over all clients, so that it does not matter who was drawn. A run that started from another one
(--init) has that one's costs before its own, and a run in phases those of all, of which a second
table has each. N/A: never reached, or no formula.
"""

import os
from collections.abc import Sequence
from typing import Any

from fedjax_flat import errors
from fedjax_flat.data import Partition
from fedjax_flat.report import tables
from fedjax_flat.report.groups import unique_paths
from fedjax_flat.run import metrics
from fedjax_flat.run.phases import records
from fedjax_flat.run.run_folder import RunFolder


def costs(
    runs: Sequence[str], target: float = 0.7, *, split: str = "test", model: str = "global"
) -> str:
    """A row per run."""
    if not 0 < target <= 1:
        raise errors.UsageError(
            f"--target {100 * target:g}: expected a score in percent, above 0 and at most 100."
        )
    rows = []
    for run, name in zip(runs, unique_paths(runs), strict=True):
        found = records(RunFolder(run))
        rounds, values = metrics.curve(found, split=split, model=model)
        if not len(rounds):
            raise errors.UsageError(
                f"{run} has no evaluations of model {model} on split {split}. Choose others with "
                "--model and --split."
            )
        reached = metrics.rounds_to(found, target, split=split, model=model)
        rows.append([
            name, f"{100 * values[-1]:.2f}",
            "N/A" if reached is None else str(reached), *_shown(run, reached), *_shown(run),
        ])
    at = f"to {100 * target:g} %"
    header = ["run", f"{metrics.score_name(found)} (%)", f"rounds {at}", f"bytes {at}",
              f"FLOPs {at}", "bytes in all", "FLOPs in all"]
    return "\n\n".join(filter(None, [tables.table(header, rows), by_phase(runs, split, model)]))


def _shown(run: str | os.PathLike, last: int | None = -1) -> tuple[str, str]:
    """Bytes and FLOPs per client up to a round, -1 for all."""
    if last is None:
        return "N/A", "N/A"
    sent, flops = spent(run, None if last < 0 else last)
    return amount(sent, "B"), "N/A" if flops is None else amount(flops, "FLOPs")


def spent(run: str | os.PathLike, last: int | None = None) -> tuple[float, float | None]:
    """(bytes of all clients, FLOPs per client) up to a round of a run, and of those before it."""
    folder = RunFolder(run)
    found = records(folder)
    first = (folder.phases or [folder])[0]
    clients = Partition.load(first.partition_file).num_clients
    sent, flops = metrics.bytes_until(found, last), metrics.flops_until(found, last)
    here = None if flops is None else flops / clients
    before = first.init()
    if before is None or before.is_file():
        return sent, here
    earlier, work = spent(before)
    return earlier + sent, None if here is None or work is None else here + work


def by_phase(
    runs: Sequence[str | os.PathLike], split: str = "test", model: str = "global"
) -> str:
    """A row per phase of the runs that have phases: what it reached, what it took; else nothing.

    Of personal models: of the global one, in phases in which clients have none of their own.
    """
    rows, score = [], ""
    for folder, name in zip(map(RunFolder, runs), unique_paths(runs), strict=True):
        done = 0
        for phase in folder.phases:
            found = metrics.read(phase.metrics_file)
            score = score or metrics.score_name(found)
            rounds, values = metrics.curve(found, split=split, model=model)
            if model == "personal" and not len(rounds):
                rounds, values = metrics.curve(found, split=split, model="global")
            last = max((r["round"] for r in found), default=0)
            sent, flops = metrics.bytes_until(found), metrics.flops_until(found)
            clients = Partition.load(phase.partition_file).num_clients
            rows.append([
                name, phase.path.name, f"{done + 1}-{done + last}" if last else "-",
                f"{100 * values[-1]:.2f}" if len(rounds) else "-", amount(sent, "B"),
                "N/A" if flops is None else amount(flops / clients, "FLOPs"), *_shown(phase.path),
            ])
            done += last
    header = ["run", "phase", "rounds", f"{split} {score} (%)", "bytes", "FLOPs", "bytes so far",
              "FLOPs so far"]
    return tables.table(header, rows, left=(0, 1)) if rows else ""


def amount(value: float, unit: str) -> str:
    """'57.1 GB'; powers of ten."""
    names: Any = ("", "k", "M", "G", "T", "P")
    step = 0
    while value >= 1000 and step < len(names) - 1:
        value, step = value / 1000, step + 1
    return f"{value:.1f} {names[step]}{unit}"
