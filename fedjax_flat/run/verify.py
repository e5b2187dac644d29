"""Rounds of a run once more, from one of its checkpoints: are they, here and now, the same bits?

Compared are the records of metrics.jsonl, but for speeds, and the whole state where the rounds end
at a checkpoint. Nothing is written.
"""

import os
from typing import Any, NamedTuple

from fedjax_flat import errors, progress
from fedjax_flat.run import environment, metrics
from fedjax_flat.run.branch import origin_of
from fedjax_flat.run.checkpoint import changed
from fedjax_flat.run.interrupt import stop_request
from fedjax_flat.run.loop import Loop
from fedjax_flat.run.restore import TrainedRun, load_run
from fedjax_flat.run.run_folder import RunFolder

MEASURED = ("examples_per_s",)
SHOWN = 4


class Verdict(NamedTuple):
    """What agreed, and what did not."""

    run: str
    start: int
    end: int
    records: int  # that were compared
    other_records: list[str]
    other_state: list[str] | None  # leaves; None: there is no checkpoint where the rounds ended
    environment: list[str]  # what is not as it was when the run was trained

    @property
    def same(self) -> bool:
        """Whether all that was compared has the same bits."""
        return not (self.other_records or self.other_state)

    def lines(self) -> list[str]:
        """For people."""
        found = [f"{self.run}: rounds {self.start + 1} to {self.end} again"]
        agree = self.records - len(self.other_records)
        found.append(f"records: {agree} of {self.records} agree")
        found += _first(self.other_records)
        if self.other_state is None:
            found.append(f"state: not compared, as there is no checkpoint of round {self.end}")
        else:
            found.append(f"state after round {self.end}: "
                         f"{'differs' if self.other_state else 'agrees, all of it'}")
            found += _first(self.other_state)
        if self.environment:
            found.append("not as when it was trained:")
            found += [f"  {line}" for line in self.environment]
        return [*found, "same bits" if self.same else "OTHER BITS"]


def _first(lines: list[str]) -> list[str]:
    more = [f"  and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return [f"  {line}" for line in lines[:SHOWN]] + more


def verify(
    run: str | os.PathLike,
    *,
    start: int | None = None,
    rounds: int = 0,
    data_dir: str | os.PathLike | None = None,
    show: bool = True,
) -> Verdict:
    """Runs the rounds from the checkpoint of round `start` up to the next one, or `rounds` of them.

    Without a `start`, from the last checkpoint but one; from the beginning if there is one only.
    """
    errors.at_least("--rounds", rounds, 0)
    folder = RunFolder(run)
    folder.check_is_one()
    start, end = _between(folder, start, rounds)
    trained = load_run(run, data_dir, round=start or None)
    if not start:
        trained = _at_beginning(trained)
    again = _again(trained, start, end, show)
    recorded = {_key(r): r for r in metrics.read(folder.metrics_file)
                if start < r["round"] <= end}
    pairs = [(recorded[_key(r)], r) for r in again.records if _key(r) in recorded]
    state = trained.at(end).state if end in folder.saved_rounds else None
    if state is None and not pairs:
        raise errors.UsageError(
            f"{folder.metrics_file} has no record of rounds {start + 1} to {end}: there is nothing "
            "to compare with. Leave --rounds out, so that they end at a checkpoint."
        )
    return Verdict(
        run=str(run), start=start, end=end, records=len(pairs),
        other_records=[_difference(a, b) for a, b in pairs if _sure(a) != _sure(b)],
        other_state=None if state is None else changed(state, again.state),
        environment=environment.changes(environment.read(folder.environment_file)),
    )


def _between(folder: RunFolder, start: int | None, rounds: int) -> tuple[int, int]:
    """(round to start from, round to end with)."""
    folder.config()  # or it is no run
    saved = folder.saved_rounds
    if not saved or saved[-1] == 0:
        raise errors.UsageError(
            f"{folder.path} has no checkpoint yet: train it first, fedjax-flat train --run "
            f"{folder.path}."
        )
    if start is None:
        start = [0, *saved][-2]
    later = [r for r in saved if r > start]
    if start not in (0, *saved) or not later:
        choices = ", ".join(map(str, sorted({0, *saved[:-1]})))
        raise errors.UsageError(
            f"--from {start}: expected a round with a checkpoint after it, {choices}. More are "
            "kept with --config.checkpoint.keep."
        )
    return start, min(later[0], start + rounds) if rounds else later[0]


def _at_beginning(trained: TrainedRun) -> TrainedRun:
    folder = trained.folder
    if 0 in folder.saved_rounds:
        return trained.at(0)
    if folder.init() or origin_of(folder):
        raise errors.UsageError(
            f"{folder.path} began with another run's model, and keeps one checkpoint only: there "
            "is none to start from. More are kept with --config.checkpoint.keep."
        )
    return trained._replace(state=trained.experiment.init())


class _Again:
    """What a loop makes, in memory."""

    saved: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.state: Any = None

    def write(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def write_clients(self, record: dict[str, Any]) -> None:
        """Their means are among the records."""

    def save(self, done: int, state: Any) -> None:
        self.state = state

    def lacks_evaluation(self, done: int) -> bool:
        del done
        return False


def _again(trained: TrainedRun, start: int, end: int, show: bool) -> _Again:
    built, again = trained.experiment, _Again()
    over, state = built.over, trained.state
    state = over.replicate(state._replace(clients=()))._replace(clients=over.share(state.clients))
    bar = progress.bar(what=f"{trained.folder.path.name} again", total=end, initial=start,
                       unit="rounds", show=show)
    with stop_request() as stop, bar:
        _, signal = Loop(built, again, bar, until=end).run(state, start, stop)
    if signal:
        raise KeyboardInterrupt
    return again


def _key(record: dict[str, Any]) -> tuple[int, str, str]:
    return record["round"], record["split"], record["model"]


def _sure(record: dict[str, Any]) -> dict[str, str]:
    """What must not change; not-a-number is one of its values."""
    return {n: repr(v) for n, v in record.items() if n not in MEASURED}


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    a, b = _sure(before), _sure(now)
    name = next(n for n in (*a, *b) if a.get(n) != b.get(n))
    return (f"round {now['round']}, {now['split']}, {now['model']}: {name} "
            f"{a.get(name, 'was not there')}, now {b.get(name, 'not there')}")
