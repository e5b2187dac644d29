"""What a sweep's driver and engines cost per cell: cells that only wait 0.1 s and say so.

    python benchmarks/sweep_overhead.py local ray slurm=local

A real cell also starts Python and imports jax, whatever its engine.
"""

import pathlib
import sys
import tempfile
import time

import fedjax_flat as ff
from fedjax_flat.sweep import book as books
from fedjax_flat.sweep import driver, engines

CELLS, WORKERS, WORK = 20, 2, 0.1
CELL = f"""
import json, sys, time
time.sleep({WORK})
with open(sys.argv[1], "w") as file:
    json.dump({{"state": "finished", "round": 1}}, file)
"""


def command(book, name, data_dir):
    """In place of what trains a cell."""
    del data_dir
    return [sys.executable, "-I", "-S", "-c", CELL, str(book.path(name, "json").resolve())]


def measure(engine: str) -> str:
    """One line."""
    kind, _, address = engine.partition("=")
    with tempfile.TemporaryDirectory() as folder:
        book = books.Book(pathlib.Path(folder))
        began = time.perf_counter()
        made = engines.ENGINES[kind](book, None, WORKERS, address)
        started = time.perf_counter()
        sweep = ff.Sweep(rows={"a": {}}, seeds=CELLS, config={"rounds": 1})
        done = driver.run(sweep, book, lambda: made).finished
        each = (time.perf_counter() - started) * WORKERS / CELLS
    return (f"{engine}: {done} of {CELLS} cells; the engine starts in {started - began:.1f} s; "
            f"{each - WORK:.2f} s per cell beyond its {WORK} s")


if __name__ == "__main__":
    engines.command = command
    for name in sys.argv[1:] or ["local"]:
        print(measure(name), flush=True)
