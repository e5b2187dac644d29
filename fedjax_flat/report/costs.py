"""What runs needed to reach a score, and in all: tables 3.7 and 4.7 to 4.10 of Fani's thesis.

Bytes are of all clients, down and up, and FLOPs (multiply-adds by formula, experiment/costs.py) the
mean over all clients, so that it does not matter who was drawn. A run that started from another one
(--init) has that one's costs before its own. N/A: never reached, or no formula.
"""

import json
from collections.abc import Sequence
from typing import Any

from fedjax_flat import errors
from fedjax_flat.data import Partition
from fedjax_flat.report import tables
from fedjax_flat.run import metrics
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
    for run in runs:
        folder = RunFolder(run)
        records = metrics.read(folder.metrics_file)
        rounds, values = metrics.curve(records, split=split, model=model)
        if not len(rounds):
            raise errors.UsageError(
                f"{run} has no evaluations of model {model} on split {split}. Choose others with "
                "--model and --split."
            )
        reached = metrics.rounds_to(records, target, split=split, model=model)
        rows.append([
            folder.path.name, f"{100 * values[-1]:.2f}",
            "N/A" if reached is None else str(reached), *_shown(run, reached), *_shown(run),
        ])
    at = f"to {100 * target:g} %"
    header = ["run", f"{metrics.score_name(records)} (%)", f"rounds {at}", f"bytes {at}",
              f"FLOPs {at}", "bytes in all", "FLOPs in all"]
    return tables.table(header, rows)


def _shown(run: str, last: int | None = -1) -> tuple[str, str]:
    """Bytes and FLOPs per client up to a round, -1 for all."""
    if last is None:
        return "N/A", "N/A"
    sent, flops = spent(run, None if last < 0 else last)
    return amount(sent, "B"), "N/A" if flops is None else amount(flops, "FLOPs")


def spent(run: str, last: int | None = None) -> tuple[float, float | None]:
    """(bytes of all clients, FLOPs per client) up to a round of a run, and of those before it."""
    folder = RunFolder(run)
    records = metrics.read(folder.metrics_file)
    clients = Partition.load(folder.path / "partition.npz").num_clients
    sent, flops = metrics.bytes_until(records, last), metrics.flops_until(records, last)
    here = None if flops is None else flops / clients
    if not folder.init_file.exists():
        return sent, here
    before, work = spent(json.loads(folder.init_file.read_text())["run"])
    return before + sent, None if here is None or work is None else here + work


def amount(value: float, unit: str) -> str:
    """'57.1 GB'; powers of ten."""
    names: Any = ("", "k", "M", "G", "T", "P")
    step = 0
    while value >= 1000 and step < len(names) - 1:
        value, step = value / 1000, step + 1
    return f"{value:.1f} {names[step]}{unit}"
