"""What runs of configs/fed3r.py came to, small enough to be kept: a line per run, and a table.

    python benchmarks/fed3r_table.py runs/fed3r_0 runs/fedavg_head_0 ... --out docs/results/fed3r

docs/fed3r.md has the commands that train them. curves.jsonl has an object per run: the settings in
which the runs differ, and of every evaluated round the accuracy, the bytes of all clients and the
multiply-adds per client up to there. Of a run in phases, rounds are counted on and `phases` says
where each ends; of one that started from another (--init), what that one took comes first.
"""

import argparse
import json
import pathlib
from typing import Any

from fedjax_flat.disk import write_atomically
from fedjax_flat.report import tables
from fedjax_flat.report.costs import amount, spent
from fedjax_flat.run import metrics, phases
from fedjax_flat.run.run_folder import RunFolder

SETTINGS = (
    "algorithm.name", "partition.alpha", "client.frozen", "data.features", "model.random.features",
    "model.random.sigma", "task.temperature", "client.learning_rate", "cohort.size",
)


def summary(run: str) -> dict[str, Any]:
    """One run's line."""
    folder = RunFolder(run)
    last = (folder.phases or [folder])[-1]
    records = phases.records(folder)
    rounds, values = metrics.curve(records)
    mean, deviation, count = metrics.window_mean(records, last.config().eval.window)
    took = [spent(run, int(t)) for t in rounds]
    written = json.loads(last.config_file.read_text())
    return {
        "run": folder.path.name,
        **{name: value for name in SETTINGS if (value := _at(written, name)) is not None},
        **({"phases": metrics.phase_ends(records)} if folder.phases else {}),
        "accuracy": mean, "deviation": deviation, "over": count,
        "rounds": rounds.tolist(), "accuracies": [round(float(v), 4) for v in values],
        "bytes": [int(sent) for sent, _ in took],
        "flops": [None if work is None else float(f"{work:.4g}") for _, work in took],
    }


def _at(nested: dict[str, Any], name: str) -> Any:
    found: Any = nested
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def main() -> None:
    """Writes and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--out", type=pathlib.Path, help="folder for curves.jsonl")
    args = parser.parse_args()
    found = [summary(run) for run in args.runs]
    if args.out:
        text = "".join(json.dumps(line) + "\n" for line in found)
        args.out.mkdir(parents=True, exist_ok=True)
        write_atomically(args.out / "curves.jsonl", text)
    rows = [
        [f["run"], str(f["rounds"][-1]), tables.percent(f["accuracy"], f["deviation"]),
         amount(f["bytes"][-1], "B"), amount(f["flops"][-1], "") if f["flops"][-1] else "N/A"]
        for f in found
    ]
    header = ["run", "rounds", "accuracy (%)", "bytes", "multiply-adds per client"]
    print(tables.table(header, rows))


if __name__ == "__main__":
    main()
