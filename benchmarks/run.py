"""Where we stand: images per second of one federated round, ours beside the alternatives.

command: make bench      (or: python benchmarks/run.py --only ours "torch 2 threads" W1)

Every system runs in its own process; the processes take turns, round by round (A B A B ...), so
that what the machine does meanwhile hits all alike. Systems that are not installed are left out:
benchmarks/requirements.txt names them. Rows go to benchmarks/out/results.json too.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys

from systems import GENERAL, SYSTEMS
from workloads import KEEPS_MEMORY, WORKLOADS, Workload

from fedjax_flat.report import tables

HERE = pathlib.Path(__file__).parent
NEEDS = {"fedjax": "fedjax", "pfl": "pfl"} | {s: "torch" for s in SYSTEMS if s.startswith("torch")}
PLAIN = ("W1", "W2")  # workloads that every system has
SLOW = {"textbook": 2}  # systems with fewer timed rounds


class Worker:
    """A system running in a process of its own."""

    def __init__(self, system: str, workload: str):
        self.system = system
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "worker.py"), system, workload],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | KEEPS_MEMORY,
        )
        self.first = self.ask("round")[0]  # compiles
        self.seconds: list[float] = []  # per image
        self.rounds: list[float] = []

    def train(self):
        """A timed round."""
        seconds, images = self.ask("round")
        self.rounds.append(seconds)
        self.seconds.append(seconds / images)

    def ask(self, command: str):
        """Sends a command and waits for its answer."""
        print(command, file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.system} failed:\n{self.process.stderr.read()[-3000:]}")
        return json.loads(line)

    def row(self, workload: Workload) -> dict:
        """The figures of this system."""
        speeds = [1 / s for s in self.seconds]
        return {
            "workload": workload.name,
            "system": self.system,
            "images_per_s_min": min(speeds),
            "images_per_s_median": statistics.median(speeds),
            "compile_s": max(0.0, self.first - statistics.median(self.rounds)),
            "peak_mb": self.ask("peak"),
            "loss": self.ask("loss"),
            "rounds": len(self.seconds),
        }

    def close(self):
        """Ends the process."""
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()


def measure(workload: Workload, systems: list[str], rounds: int) -> list[dict]:
    """Runs all systems side by side on one workload."""
    workers = []
    for system in systems:
        print(f"{workload.name}: starting {system}", file=sys.stderr, flush=True)
        workers.append(Worker(system, workload.name))
    rates = []
    for i in range(rounds):
        print(f"{workload.name}: timed round {i + 1} of {rounds}", file=sys.stderr, flush=True)
        for worker in workers:
            if i < SLOW.get(worker.system, rounds):
                worker.train()
        if workers[0].system.startswith("ours"):
            rates.append(workers[0].ask("matmul"))
    rows = [w.row(workload) for w in workers]
    by_system = {w.system: w for w in workers}
    for row in rows:
        if rates and workload.flops_per_image():
            achieved = row["images_per_s_median"] * workload.flops_per_image() / 1e9
            row["matmul_gflops"] = statistics.median(rates)
            row["share_of_matmul"] = achieved / row["matmul_gflops"]
        reference = by_system.get("torch 2 threads")
        if reference and row["rounds"] == len(reference.seconds):
            # Median over turns of the ratio within a turn.
            own = by_system[row["system"]]
            pairs = zip(own.seconds, reference.seconds, strict=True)
            row["ratio_to_torch"] = statistics.median(t / o for o, t in pairs)
        elif reference:
            median = statistics.median(reference.seconds)
            row["ratio_to_torch"] = row["images_per_s_median"] * median
    for worker in workers:
        worker.close()
    return rows


def show(rows: list[dict]) -> str:
    """The rows as a table for the terminal."""
    cell = lambda row, name, form: format(row[name], form) if name in row else "-"
    header = ["workload, system", "img/s min", "median", "x torch", "of matmul", "compile s",
              "peak MB", "loss"]
    body = [
        [f"{r['workload']} {r['system']}", f"{r['images_per_s_min']:.0f}",
         f"{r['images_per_s_median']:.0f}", cell(r, "ratio_to_torch", ".2f"),
         cell(r, "share_of_matmul", ".0%"), f"{r['compile_s']:.1f}", f"{r['peak_mb']:.0f}",
         f"{r['loss']:.3f}"]
        for r in rows
    ]
    return tables.table(header, body)


def main():
    """Measures, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME",
                        help=f"systems and workloads: {', '.join([*SYSTEMS, *WORKLOADS])}")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds")
    args = parser.parse_args()
    unknown = [n for n in args.only if n not in SYSTEMS and n not in WORKLOADS]
    if unknown:
        parser.error(f"unknown {unknown[0]!r}; expected {', '.join([*SYSTEMS, *WORKLOADS])}")
    systems = [s for s in SYSTEMS if s in args.only] or list(SYSTEMS)
    workloads = [w for w in WORKLOADS if w in args.only] or list(WORKLOADS)
    missing = [s for s in systems if s in NEEDS and not importlib.util.find_spec(NEEDS[s])]
    if missing:
        print(f"not installed, left out: {', '.join(missing)}", file=sys.stderr)
    systems = [s for s in systems if s not in missing]
    rows = []
    for name in workloads:
        able = [s for s in systems if s in GENERAL or name in PLAIN]
        rows += measure(WORKLOADS[name], able, args.rounds)
    print(show(rows))
    out = HERE / "out" / "results.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(rows, indent=2) + "\n")
    print(f"rows: {out}")


if __name__ == "__main__":
    main()
