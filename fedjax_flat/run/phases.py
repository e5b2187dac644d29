"""A run in phases: RUN/1_fed3r, RUN/2_fedavg_head, ... trained in turn, each an ordinary run.

Every phase has a run folder of its own, in which it is trained, stopped and resumed as any run is,
and which every command takes. It starts from the model with which the one before ended
(`hand_over`), just as `--init` would have it: by hand, one after the other, has the same bits. RUN
holds the settings of all and the lock. What has begun keeps its settings; what has not may still be
changed, and phases may be added at the end.
"""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Mapping
from typing import Any

import jax
import ml_collections
import numpy as np

from fedjax_flat import disk, errors, experiment
from fedjax_flat.experiment import config as config_lib
from fedjax_flat.experiment.phases import phase_configs
from fedjax_flat.run import distributed, loop, mark, metrics
from fedjax_flat.run.interrupt import stop_request
from fedjax_flat.run.loop import Result
from fedjax_flat.run.run_folder import LostConfigError, RunFolder

logger = logging.getLogger("fedjax_flat")
Configs = Mapping[str, ml_collections.ConfigDict]


def train(
    config: ml_collections.ConfigDict,
    run: str | os.PathLike,
    *,
    data_dir: str | os.PathLike | None = None,
    start_from: str | os.PathLike | None = None,
    progress: bool = True,
    allow_other_kernels: bool = False,
    fresh: bool = False,
    init: str | os.PathLike | None = None,
) -> Result:
    """Trains as `config` says in run folder `run`, phase after phase if it has any.

    See `loop.train` for what is given. Of phases, the result has the state and models of the last
    that was trained, and the records of all on one axis of rounds.
    """
    given: dict[str, Any] = {
        "data_dir": data_dir, "progress": progress, "allow_other_kernels": allow_other_kernels
    }
    with contextlib.ExitStack() as stack:
        if jax.process_count() > 1:  # one that left at once would leave the others waiting for it
            stack.enter_context(stop_request())
        if config.get("phases"):
            return _train(config, run, start_from, fresh, init, given)
        return loop.train(config, run, start_from=start_from, fresh=fresh, init=init, **given)


def _train(config, run, start_from, fresh: bool, init, given: dict[str, Any]) -> Result:
    """Phase after phase."""
    if start_from is not None:
        raise errors.UsageError(
            f"--from {start_from} does not go with phases: each begins with a model, not amid "
            "another run. Start the first from a run's model with --init."
        )
    configs, folder = phase_configs(config), RunFolder(run)
    if fresh:
        experiment.build(next(iter(configs.values())), given["data_dir"])  # or nothing is deleted
    with _in_use(folder, fresh):
        first = 0
        if distributed.is_primary():
            _open(folder, config, configs, init)
            first = _newest(folder, configs)
        first = int(distributed.from_primary(np.int32(first)))
        for i, (name, each) in list(enumerate(configs.items()))[first:]:
            here = _folder(folder, i, name)
            if i:
                before = _folder(folder, i - 1, list(configs)[i - 1])
                init = None if _has_begun(here) else before.path
            logger.info("phase %d of %d: %s", i + 1, len(configs), name)
            result = loop.train(each, here.path, init=init, **given)
            (asked,) = distributed.largest(result.asked_to_stop or 0)
            more = i + 1 < len(configs)
            stopped = result.stopped_by or (asked or None if more else None)
            if stopped:
                break
    return dataclasses.replace(
        result, records=records(folder), stopped_by=stopped, phase=name
    )


def records(run: RunFolder) -> list[dict[str, Any]]:
    """What was recorded; of phases all of it, rounds counted on and each record with its phase.

    The model with which a phase starts was evaluated at the end of the one before, unless it is
    looked at in another way from here on: as clients' own models, say.
    """
    if not run.phases:
        return metrics.read(run.metrics_file)
    found: list[dict[str, Any]] = []
    done = 0
    for phase in run.phases:
        own = metrics.read(phase.metrics_file)
        name = phase.path.name.partition("_")[2]
        seen = {(r["split"], r["model"]) for r in found}
        found += [
            {**r, "round": done + r["round"], "phase": name} for r in own
            if r["round"] or (r["split"], r["model"]) not in seen
        ]
        done += max((r["round"] for r in own), default=0)
    return found


@contextlib.contextmanager
def _in_use(folder: RunFolder, fresh: bool):
    """The lock of all phases, taken by process 0; what was here is deleted if that is asked for."""
    if not distributed.is_primary():
        yield
        return
    folder.check_path()
    fresh = fresh and folder.can_be_deleted()
    with folder.in_use():
        if fresh:
            folder.delete()
        yield


def _folder(folder: RunFolder, i: int, name: str) -> RunFolder:
    return RunFolder(folder.path / mark.phase_name(i + 1, name))


def _has_begun(phase: RunFolder) -> bool:
    return mark.is_marked(phase.path) and not phase.is_new()


def _newest(folder: RunFolder, configs: Configs) -> int:
    """The last phase that has begun: those before it are finished."""
    begun = [i for i, n in enumerate(configs) if _has_begun(_folder(folder, i, n))]
    return max(begun, default=0)


def _open(folder: RunFolder, config, configs: Configs, init) -> None:
    """Marks the folder as ours, or checks that what has begun there is what the config says."""
    with folder.explained():
        if folder.is_new():
            mark.write(folder.path)
        else:
            _check_is_in_phases(folder)
            _check_begun(folder, configs)
            if _newest(folder, configs):
                _folder(folder, 0, next(iter(configs))).check_init(init)
        folder.figures.mkdir(parents=True, exist_ok=True)
        folder.record(config, None)


def _check_is_in_phases(folder: RunFolder) -> None:
    try:
        before = folder.config()
    except LostConfigError as e:
        disk.set_aside(folder.config_file, f"cannot be read ({e.__cause__}) and is written anew "
                       "from the config given")
        return
    if not before.phases:
        raise errors.UsageError(
            f"run folder {folder.path} holds a run without phases. Choose another folder with "
            "--run, or delete this run with --fresh."
        )


def _check_begun(folder: RunFolder, configs: Configs) -> None:
    """Refuses other settings of a phase that has begun, and another number of finished rounds."""
    advice = "Choose another folder with --run, or delete all phases with --fresh."
    expected = {_folder(folder, i, name).path.name: name for i, name in enumerate(configs)}
    for there in folder.phases:
        if there.path.name not in expected:
            raise errors.UsageError(
                f"{folder.path} has a phase {there.path.name}, and config.phases has not: it has "
                f"{', '.join(expected)}. Put it back. {advice}"
            )
    newest = _newest(folder, configs)
    for i, (name, now) in enumerate(configs.items()):
        there = _folder(folder, i, name)
        if not _has_begun(there):
            continue
        try:
            before = there.config()
        except LostConfigError:
            continue  # whoever trains it says so
        changed = config_lib.differences(before, now)
        if i < newest and before.rounds != now.rounds:
            changed.append(f"rounds: {before.rounds} -> {now.rounds}")
        if changed:
            next_name = list(configs)[min(i + 1, len(configs) - 1)]
            state = f"is finished and {next_name} has begun from its model" if i < newest else (
                "has begun"
            )
            raise errors.UsageError(
                f"phase {name} of {folder.path} {state}; its settings cannot change:\n  "
                + "\n  ".join(changed) + f"\n{advice}"
            )
