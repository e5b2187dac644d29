"""metrics.jsonl: one JSON object per record, and what is read back from it.

Three kinds of record share their names. `split: cohort, model: local` is what clients saw while
training; `split: test, model: global` (or another split, another model) is an evaluation, with
loss, the task's score and what else it reports, or a measurement of curvature, with lambda_1. There
`model: client 3` is the one with which client 3 ends the next round, `split: own` its own data, and
`model: personal` all clients' own models, each on its own data. Where the records of several phases
are read as one (phases.py), each has its `phase` too.
"""

import collections
import contextlib
import itertools
import json
import os
import pathlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from fedjax_flat import disk, errors


def read(path: str | os.PathLike) -> list[dict[str, Any]]:
    """All records; a last line cut short by a killed process is left out, damaged ones are said."""
    records, damaged = _lines(pathlib.Path(path))
    if damaged:
        warnings.warn(f"{path}: {_unreadable(damaged)}", stacklevel=2)
    return records


def _lines(path: pathlib.Path) -> tuple[list[dict[str, Any]], list[int]]:
    """(records, numbers of the lines that are none)."""
    if not path.is_file():
        return [], []
    records, damaged = [], []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if _is_record(record):
            records.append(record)
        else:
            damaged.append(number)
    return records, damaged


def _is_record(found: Any) -> bool:
    return isinstance(found, dict) and all(
        isinstance(found.get(name), kind)
        for name, kind in (("round", int), ("split", str), ("model", str))
    )


def _unreadable(lines: list[int]) -> str:
    return f"line {ranges(lines)} cannot be read and is left out"


def ranges(numbers: Iterable[int]) -> str:
    """'3-5, 9' of 3, 4, 5, 9."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


class Logger(Protocol):
    """Where else records go."""

    def write(self, record: dict[str, Any]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Writer:
    """Appends records to metrics.jsonl, and hands them to `also` (loggers.py)."""

    def __init__(self, path: str | os.PathLike, *, after_round: int):
        self._path = pathlib.Path(path)
        records, damaged = _lines(self._path)
        if damaged:
            disk.set_aside(self._path, _unreadable(damaged))
        # Rounds past the checkpoint will be run again: their records go.
        self.kept = [r for r in records if r["round"] <= after_round]
        disk.write_atomically(self._path, "".join(json.dumps(r) + "\n" for r in self.kept))
        self._file = open(self._path, "a", opener=disk.no_link)  # noqa: SIM115 (see `close`)
        self.also: Sequence[Logger] = ()

    def write(self, record: dict[str, Any]) -> None:
        """Adds one record."""
        self._file.write(json.dumps(record) + "\n")
        for logger in self.also:
            logger.write(record)

    def flush(self) -> None:
        """Records up to here survive a killed process."""
        self._file.flush()
        os.fsync(self._file.fileno())
        for logger in self.also:
            logger.flush()

    def close(self) -> None:
        """Writes what is pending."""
        with contextlib.ExitStack() as stack:  # all of it, even on a full disk
            for logger in self.also:
                stack.callback(logger.close)
            stack.callback(self._file.close)
            stack.callback(self.flush)


def score_name(records) -> str:
    """What the task of these records calls its score: it stands right after the loss."""
    names = collections.Counter(
        second
        for record in records if record["split"] != "cohort"
        for first, second in itertools.pairwise(record) if first == "loss"
    )
    return names.most_common(1)[0][0] if names else "accuracy"  # one damaged record decides nothing


def written(name: str) -> str:
    """A score's name as people write it."""
    return {"miou": "mIoU"}.get(name, name)


def curve(records, *, split: str = "test", model: str = "global", name: str = ""):
    """(rounds, values) of one quantity, by default the score."""
    name = name or score_name(records)
    points = [
        (r["round"], r[name])
        for r in records
        if (r["split"], r["model"]) == (split, model) and name in r
    ]
    rounds, values = zip(*points, strict=True) if points else ((), ())
    return np.array(rounds), np.array(values)


def evaluated(records) -> list[tuple[str, str]]:
    """The (model, split) of which there are scores, in the order of their first."""
    score = score_name(records)
    return list(
        dict.fromkeys(
            (r["model"], r["split"])
            for r in records
            if r["split"] != "cohort" and score in r
        )
    )


def window_mean(records, window: int, **selection) -> tuple[float, float, int]:
    """(mean, standard deviation, number) over the last `window` rounds: the reported number.

    Of phases, over rounds of the last one that has such scores. Round 0, before any training, is
    never one of them.
    """
    records = [r for r in records if r["round"]]
    for phase in reversed(phase_ends(records)):
        own = [r for r in records if r["phase"] == phase]
        if len(curve(own, **selection)[0]):
            records = own
            break
    rounds, values = curve(records, **selection)
    if not len(rounds):
        wanted = ", ".join(f"{name} = {value}" for name, value in selection.items())
        raise errors.UsageError(
            f"there is no score of a trained round to average in the metrics ({wanted})."
        )
    last = values[rounds > rounds.max() - window]
    return float(last.mean()), float(last.std()), len(last)


def phase_ends(records) -> dict[str, int]:
    """The last round of every phase, in their order; {} of a run without phases."""
    return {r["phase"]: r["round"] for r in records if "phase" in r and r["split"] == "cohort"}


def smoothed(values, decay: float):
    """s_0 = a_0, s_t = decay s_{t-1} + (1 - decay) a_t; decay 0 changes nothing."""
    out: list[float] = []
    for a in values:
        out.append(decay * out[-1] + (1 - decay) * a if out else a)
    return np.array(out)


def rounds_to(records, target: float, *, smooth: float = 0.0, **selection) -> int | None:
    """The first evaluated round with at least the `target` score; None if there is none."""
    rounds, values = curve(records, **selection)
    reached = rounds[smoothed(values, smooth) >= target]
    return int(reached[0]) if len(reached) else None


def bytes_per_client(records) -> tuple[float, float]:
    """What a client receives and sends in a round, on average."""
    cohorts = [r for r in records if r["split"] == "cohort"]
    total = lambda name: sum(r.get(name, 0) for r in cohorts)
    clients = max(1, total("clients"))
    down, up = (total(name) / clients for name in ("bytes_down", "bytes_up"))
    return down, up


def flops_until(records, last_round: int | None = None) -> float | None:
    """Multiply-adds of all clients, as `bytes_until`; None where no formula counted them."""
    found = [r.get("flops") for r in records if r["split"] == "cohort"
             and (last_round is None or r["round"] <= last_round)]
    return None if None in found else sum(found, 0.0)


def running(records, name: str) -> dict[int, float]:
    """What was spent up to every round of training: bytes, flops, seconds, wall; from 0 on.

    `seconds` are simulated (docs/clock.md), `wall` those that the rounds took here. Nothing where
    a round does not say.
    """
    parts: dict[str, Callable[[dict[str, Any]], float | None]] = {
        "bytes": lambda r: r.get("bytes_down", 0) + r.get("bytes_up", 0),
        "wall": lambda r: r["examples"] / r["examples_per_s"] if r.get("examples_per_s") else None,
    }
    of_round = parts.get(name, lambda r: r.get(name))
    total, found = 0.0, {0: 0.0}
    for record in records:
        if record["split"] == "cohort":
            spent = of_round(record)
            if spent is None:
                return {}
            total += spent
            found[record["round"]] = total
    return found


def bytes_until(records, last_round: int | None = None) -> int:
    """Bytes sent, down, up and between clients, in all rounds or up to `last_round`."""
    return sum(
        r.get("bytes_down", 0) + r.get("bytes_up", 0) + r.get("bytes_across", 0)
        for r in records
        if r["split"] == "cohort" and (last_round is None or r["round"] <= last_round)
    )
