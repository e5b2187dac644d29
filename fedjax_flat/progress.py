"""How far something is: a bar on a terminal, in a log file a line per minute."""

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import tqdm

from fedjax_flat import errors

EVERY = 60.0  # seconds between lines


def bar(
    steps: Iterable[Any] | None = None, *, what: str, total: int | None = None, initial: int = 0,
    unit: str = "steps", show: bool = True,
) -> Any:
    """An iterator over `steps` that says how far it is; or a context, which is told: `update(n)`.

    `set_postfix(name=text)` adds a value.
    """
    what = errors.printable(what)
    if total is None and isinstance(steps, Sized):
        total = len(steps)
    if not show or sys.stderr.isatty():
        return tqdm.tqdm(steps, desc=what, total=total, initial=initial, unit=f" {unit}",
                         dynamic_ncols=True, disable=not show)
    return Lines(steps or (), what=what, total=total, initial=initial, unit=unit)


class Lines:
    """'runs/a: 120 of 300 rounds, loss 0.123, 0.5 s each, 1:30 to go', once a minute."""

    def __init__(self, steps: Iterable[Any], *, what: str, total: int | None, initial: int,
                 unit: str):
        self._steps, self._what, self._total, self._unit = steps, what, total, unit
        self._first = self._done = initial
        self._began = self._said = time.monotonic()
        self._values: dict[str, str] = {}

    def __iter__(self) -> Iterator[Any]:
        with self:
            for step in self._steps:
                yield step
                self.update()

    def update(self, n: int = 1) -> None:
        """So many more are done."""
        self._done += n
        if time.monotonic() - self._said >= EVERY:
            self._say()

    def set_postfix(self, refresh: bool = True, **values: str) -> None:
        """What else to say in the next line."""
        del refresh
        self._values = values

    def _say(self) -> None:
        self._said = time.monotonic()
        each = (self._said - self._began) / max(1, self._done - self._first)
        words = [f"{self._done}{f' of {self._total}' if self._total else ''} {self._unit}",
                 *(f"{name} {value}" for name, value in self._values.items()), f"{each:.3g} s each"]
        if self._total and self._done < self._total:
            minutes, seconds = divmod(int(each * (self._total - self._done)), 60)
            words.append(f"{minutes}:{seconds:02d} to go")
        print(f"{self._what}: {', '.join(words)}", file=sys.stderr, flush=True)

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *error: object) -> None:
        if self._said > self._began:  # one line at the end, if there were any
            self._say()
