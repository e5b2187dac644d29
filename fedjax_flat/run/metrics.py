"""metrics.jsonl: one JSON object per record, and what is read back from it.

Three kinds of record share their names. `split: cohort, model: local` is what clients saw while
training; `split: test, model: global` (or another split, another model) is an evaluation, with
loss, the task's score and what else it reports, or a measurement of curvature, with lambda_1. There
`model: client 3` is the one with which client 3 ends the next round, `split: own` its own data, and
`model: personal` all clients' own models, each on its own data.
"""

import json
import os
import pathlib
from typing import Any

import numpy as np

from fedjax_flat.run.run_folder import write_atomically


def read(path: str | os.PathLike) -> list[dict[str, Any]]:
    """All records; a last line cut short by a killed process is left out."""
    path = pathlib.Path(path)
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]


class Writer:
    """Appends records to metrics.jsonl and, if asked, to TensorBoard events."""

    def __init__(self, path: str | os.PathLike, *, after_round: int, tensorboard: bool = False):
        self._path = pathlib.Path(path)
        # Rounds past the checkpoint will be run again: their records go.
        kept = [r for r in read(self._path) if r["round"] <= after_round]
        write_atomically(self._path, "".join(json.dumps(r) + "\n" for r in kept))
        self._file = open(self._path, "a")  # noqa: SIM115 (closed by `close`)
        self._events = self._event_writer(after_round) if tensorboard else None

    def _event_writer(self, after_round: int):
        try:
            import tensorboardX
        except ImportError as e:
            from fedjax_flat import errors

            raise errors.UsageError(
                "config.tensorboard needs tensorboardX: pip install 'fedjax-flat[tensorboard]'."
            ) from e
        folder = self._path.parent / "tensorboard"
        return tensorboardX.SummaryWriter(str(folder), purge_step=after_round + 1)

    def write(self, record: dict[str, Any]) -> None:
        """Adds one record."""
        self._file.write(json.dumps(record) + "\n")
        if self._events:
            prefix = f"{record['split']}/{record['model']}"
            for name, value in record.items():
                if isinstance(value, float):
                    self._events.add_scalar(f"{prefix}/{name}", value, record["round"])

    def flush(self) -> None:
        """Records up to here survive a killed process."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Writes what is pending."""
        self.flush()
        self._file.close()
        if self._events:
            self._events.close()


def score_name(records) -> str:
    """What the task of these records calls its score: it stands right after the loss."""
    for record in records:
        if "loss" in record and record["split"] != "cohort":
            names = list(record)
            return names[names.index("loss") + 1]
    return "accuracy"


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
    """(mean, standard deviation, number) over the last `window` rounds: the reported number."""
    rounds, values = curve(records, **selection)
    last = values[rounds > rounds.max(initial=0) - window]
    return float(last.mean()), float(last.std()), len(last)


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


def flops_until(records, last_round: int | None = None) -> float | None:
    """Multiply-adds of all clients, as `bytes_until`; None where no formula counted them."""
    found = [r.get("flops") for r in records if r["split"] == "cohort"
             and (last_round is None or r["round"] <= last_round)]
    return None if None in found else sum(found, 0.0)


def bytes_until(records, last_round: int | None = None) -> int:
    """Bytes sent, down and up, in all rounds or up to `last_round`."""
    return sum(
        r["bytes_down"] + r["bytes_up"]
        for r in records
        if r["split"] == "cohort" and (last_round is None or r["round"] <= last_round)
    )
