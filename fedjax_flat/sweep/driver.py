"""Runs the cells of a sweep that have not ended, a few at a time, and says how it goes.

Cells are started in an order that has all rows and values with the first seed before the second, so
that half a sweep answers the question coarsely. With a rule, cells that are behind are stopped
(their seeds, too, count one by one):

    median    a cell's best score is below the median of the others' means up to that round
    halving   at rounds stop_after * eta^n, a cell is not among the best 1 / eta that got there

Scores are of the split on which settings are chosen, never of test unless that is asked for.
"""

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from fedjax_flat import errors
from fedjax_flat.sweep import plan
from fedjax_flat.sweep.book import ENDED, Book
from fedjax_flat.sweep.engines import Engine, Job
from fedjax_flat.sweep.plan import Cell, Sweep

LOOK = 0.2  # seconds


@dataclasses.dataclass
class Outcome:
    """How many cells ended how, and what was said of those that failed."""

    finished: int = 0
    stopped: int = 0
    failed: dict[str, str] = dataclasses.field(default_factory=dict)


def run(
    sweep: Sweep,
    book: Book,
    make_engine: Callable[[], Engine],
    *,
    show: Callable[[str], None] | None = None,
) -> Outcome:
    """Runs what has not ended; on Ctrl-C its workers save, and the same command goes on."""
    cells = {cell.name: cell for cell in plan.cells(sweep)}
    order = sorted(cells, key=lambda name: (cells[name].seed, list(cells).index(name)))
    with book.in_use():
        book.write_plan(list(cells.values()), sweep.choose_by)
        waiting = [n for n in order if book.entry(n).get("state") not in ENDED]
        tries = dict.fromkeys(cells, 0)
        jobs: dict[str, Job] = {}
        engine = make_engine()
        try:
            while waiting or jobs:
                while waiting and len(jobs) < engine.workers:
                    name = waiting.pop(0)
                    tries[name] += 1
                    book.path(name, "json").unlink(missing_ok=True)
                    book.path(name, "stop").unlink(missing_ok=True)
                    jobs[name] = engine.submit(name)
                for name in [n for n, job in jobs.items() if job.done()]:
                    del jobs[name]
                    if book.entry(name).get("state") not in ENDED and tries[name] < sweep.attempts:
                        waiting.append(name)
                _give_up(sweep, book, cells, jobs)
                if show:
                    show(table(book, cells, jobs, waiting))
                time.sleep(LOOK)
        finally:
            for job in jobs.values():
                job.cancel()
            engine.close()
    return _outcome(book, cells)


def _outcome(book: Book, cells: dict[str, Cell]) -> Outcome:
    found = Outcome()
    for name in cells:
        entry = book.entry(name)
        if entry.get("state") == "finished":
            found.finished += 1
        elif entry.get("state") == "stopped":
            found.stopped += 1
        else:
            said = entry.get("why") or " | ".join(book.last_lines(name)) or "killed"
            found.failed[name] = said
    return found


def _give_up(sweep: Sweep, book: Book, cells: dict[str, Cell], jobs: dict[str, Job]) -> None:
    """Asks cells that are behind to stop."""
    if sweep.stop == "none" or not jobs:
        return
    curves = {name: book.scores(name, sweep.choose_by) for name in cells}
    for name in jobs:
        others = {n: c for n, c in curves.items() if n != name}
        if behind(sweep, curves[name], list(others.values())):
            book.path(name, "stop").touch()


def behind(sweep: Sweep, curve: list[tuple[int, float]], others: list[list[tuple[int, float]]]):
    """Whether a cell with this curve should stop, by the sweep's rule."""
    if not curve or curve[-1][0] < sweep.stop_after:
        return False
    if sweep.stop == "median":
        now = curve[-1][0]
        far = [other for other in others if other and other[-1][0] >= now]
        means = [statistics.fmean(s for t, s in other if t <= now) for other in far
                 if other[0][0] <= now]
        return bool(means) and max(s for _, s in curve) < statistics.median(means)
    rung = sweep.stop_after
    while rung * sweep.eta <= curve[-1][0]:
        rung *= sweep.eta
    mine = _at(curve, rung)
    reached = [s for s in (_at(other, rung) for other in others) if s is not None]
    if mine is None or len(reached) + 1 < sweep.eta:
        return False
    better = sum(score > mine for score in reached)
    return better >= max(1, (len(reached) + 1) // sweep.eta)


def _at(curve: list[tuple[int, float]], round: int) -> float | None:
    """The first score from a round on."""
    return next((score for t, score in curve if t >= round), None)


def table(book: Book, cells: dict[str, Cell], jobs: dict[str, Any], waiting: list[str]) -> str:
    """One line per row of the sweep: how many cells are in which state, and the newest score."""
    lines = []
    for row in dict.fromkeys(cell.row for cell in cells.values()):
        mine = [name for name, cell in cells.items() if cell.row == row]
        states = {name: book.entry(name).get("state", "failed") for name in mine}
        states |= dict.fromkeys((n for n in waiting if n in states), "waiting")
        states |= dict.fromkeys((n for n in jobs if n in states), "running")
        count = lambda state, states=states: sum(s == state for s in states.values())
        words = [f"{count(s)} {s}" for s in ("finished", "running", "waiting", "stopped", "failed")
                 if count(s)]
        lines.append(f"{errors.printable(row)}: {', '.join(words)}")
    return "\n".join(lines)


class Screen:
    """Shows a table in place on a terminal; elsewhere once a minute, when it has changed."""

    def __init__(self, stream=None):
        self._stream = stream or sys.stderr
        self._last, self._when, self._lines = "", 0.0, 0

    def __call__(self, text: str) -> None:
        if text == self._last:
            return
        if self._stream.isatty():
            back = f"\x1b[{self._lines}F\x1b[J" if self._lines else ""
            self._stream.write(f"{back}{text}\n")
            self._lines = text.count("\n") + 1
        elif time.monotonic() - self._when > 60 or not self._last:
            self._stream.write(f"{text}\n")
            self._when = time.monotonic()
        else:
            return
        self._stream.flush()
        self._last = text
