"""A run that branches off another: what both would have trained alike is not trained twice.

SWA changes nothing before it starts, so a run with it shares its first rounds with the run without
it. `RUN@ROUND` names a checkpoint, `RUN` the newest one. The new folder begins with its state, with
the metrics up to there and with origin.json, which says where they came from; from then on it is a
run as any other, and has the bits that it would have had from scratch.

Up to that round both configs must train alike. They may differ in what is only looked at (`rounds`,
`eval`, `checkpoint`, ...) and in models that are averaged beside the trained one: SWA must start
later, in both; WIMA's window starts empty, at a multiple of its length, and is what it would have
been once it is full.
"""

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_collections

from fedjax_flat import disk, errors, experiment
from fedjax_flat.experiment import config as config_lib
from fedjax_flat.experiment import usage
from fedjax_flat.experiment.method import build_averages
from fedjax_flat.run import metrics
from fedjax_flat.run.checkpoint import Checkpoints
from fedjax_flat.run.run_folder import RunFolder, write_atomically

logger = logging.getLogger("fedjax_flat")


class Origin(NamedTuple):
    """The checkpoint that a run began with."""

    run: str
    round: int
    sha256: str


def named(start_from: str | os.PathLike) -> tuple[RunFolder, int | None]:
    """(run folder, round) of RUN@ROUND; (run folder, None) of RUN."""
    text = os.fspath(start_from)
    run, at, round = text.rpartition("@")
    if not at or pathlib.Path(text).exists():
        return RunFolder(text), None
    if not run or not round.isdigit():
        raise errors.UsageError(f"--from {text}: expected RUN or RUN@ROUND, e.g. runs/a@7500.")
    return RunFolder(run), int(round)


def origin_of(folder: RunFolder) -> Origin | None:
    """Where a run came from; None if it began by itself."""
    found = disk.told(folder.origin_file, Origin._fields)
    return Origin(**found) if found else None


def begin(
    built: experiment.Experiment,
    run: str | os.PathLike,
    start_from: str | os.PathLike,
    *,
    allow_other_kernels: bool = False,
) -> None:
    """Makes run folder `run` begin with the checkpoint `start_from`, unless it did already."""
    target, (source, asked) = RunFolder(run), named(start_from)
    if target.config_file.exists() or target.origin_file.exists():
        asked = _same_beginning(target, source, asked)
    if target.config_file.exists():
        return
    source.check_is_one()
    old, new = source.config(), built.config
    source.check_imports(new)
    if not source.saved_rounds:
        raise errors.UsageError(
            f"{source.path} has no checkpoint yet: train it first, fedjax-flat train --run "
            f"{source.path}."
        )
    with contextlib.closing(Checkpoints(source.checkpoints)) as checkpoints:
        done = checkpoints.rounds[-1] if asked is None else asked
        checkpoints.require(done)
        if done > new.rounds:
            raise errors.UsageError(
                f"--from {source.path}@{done} is past rounds = {new.rounds}. Raise rounds, or "
                "branch off earlier."
            )
        _check_alike(source, old, new, done, checkpoints.rounds)
        source.check_partition(built.partition)
        if not allow_other_kernels:
            source.check_kernels()
        averages = build_averages(old)
        found = checkpoints.restore(dataclasses.replace(built, averages=averages).init(), done)
        assert found  # or `restore` has said why not
        origin = Origin(str(source.path.absolute()), done, checkpoints.digest(done))
    same = {n for n in averages if n in built.averages and _settings(n, old) == _settings(n, new)}
    state, fresh = found[1], built.init().averages
    state = state._replace(averages={
        name: state.averages[name] if name in same else fresh[name] for name in built.averages
    })
    target.open(new, built.partition)
    with target.in_use(), contextlib.closing(Checkpoints(target.checkpoints)) as saved:
        write_atomically(target.origin_file, json.dumps(origin._asdict(), indent=2) + "\n")
        _copy_metrics(source, target, done, without=averages.keys() - same)
        saved.save(done, state)
    logger.info("goes on from round %d of %s", done, source.path)
    if "wima" in built.averages and "wima" not in same:
        full = done + new.server.wima.window
        logger.info("WIMA averages fewer models than its window until round %d", full)


def _same_beginning(target: RunFolder, source: RunFolder, asked: int | None) -> int:
    """The round at which `target` branched off `source`; refuses any other beginning."""
    came = origin_of(target)
    if came and came.run == str(source.path.absolute()) and asked in (None, came.round):
        return came.round
    began = f"began with {came.run}@{came.round}" if came else "began by itself"
    raise errors.UsageError(
        f"{target.path} already holds a run, which {began}. Leave --from out to go on with it, "
        "choose another folder with --run, or delete this run with --fresh."
    )


def _check_alike(source: RunFolder, old, new, done: int, rounds: list[int]) -> None:
    """Refuses two configs that would have trained differently in the first `done` rounds."""
    changed = config_lib.differences(_without_averages(old), _without_averages(new))
    advice = "Train it from scratch, without --from."
    if not changed:
        changed = _averaged_otherwise(old, new, done)
        fit = [r for r in rounds if not _averaged_otherwise(old, new, r)]
        advice = f"This would do: --from {source.path}@{fit[-1]}." if fit else (
            f"{source.path} keeps no checkpoint that would do; its config.checkpoint.keep is "
            f"{old.checkpoint.keep}."
        )
    if changed:
        raise errors.UsageError(
            f"--from {source.path}@{done}: up to that round the new run would have trained "
            "otherwise:\n  " + "\n  ".join(changed) + f"\n{advice}"
        )


def _averaged_otherwise(old, new, done: int) -> list[str]:
    """Which averages forbid to branch off after round `done`."""
    found = []
    if _settings("swa", old) != _settings("swa", new):
        found = [
            f"server.swa.start: {usage.swa_start(config)} {whose}, expected a later round"
            for whose, config in (("there", old), ("here", new))
            if "swa" in usage.averages(config) and usage.swa_start(config) <= done
        ]
    window = new.server.wima.window
    if _settings("wima", new) not in ({}, _settings("wima", old)) and done % window:
        found.append(f"server.wima.window: {window}, expected a divisor of {done}")
    return found


def _without_averages(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """The config without SWA and WIMA, however they were asked for."""
    bare = config_lib.from_flat(config_lib.flatten(config))
    names = [n for n in bare.algorithm.name.split("+") if n not in usage.AVERAGES]
    bare.algorithm.name, bare.server.average = "+".join(names), "none"
    return config_lib.only_used(bare)


def _settings(average: str, config: ml_collections.ConfigDict) -> Mapping[str, Any]:
    """What an average depends on; {} if it is not kept."""
    if average not in usage.averages(config):
        return {}
    settings = dict(config.server[average])
    return settings | ({"start": usage.swa_start(config)} if average == "swa" else {})


def _copy_metrics(source: RunFolder, target: RunFolder, done: int, *, without) -> None:
    """The records up to round `done`, but for models that the new run averages otherwise."""
    for old, new in ((source.metrics_file, target.metrics_file),
                     (source.clients_file, target.clients_file)):
        kept = [r for r in metrics.read(old) if r["round"] <= done and r["model"] not in without]
        if kept:
            write_atomically(new, "".join(json.dumps(r) + "\n" for r in kept))
