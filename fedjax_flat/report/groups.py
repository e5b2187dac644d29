"""Runs that are told apart by their seeds alone are one: which those are, and what they are called.

A number of several seeds is the mean over them, and after ± the deviation over them (divided by
their number); of one run, the deviation over the last rounds. Runs are seeds of one another if
their settings agree but for seeds, and for what changes no bit of training (`config.FREE`); one
seed twice is two runs. They are called as their folders are: `fedavg` is the common name of
fedavg_0 and fedavg_1, and of fedavg/seed0 and fedavg/seed1; where folders have one name, by as much
of the path as tells them apart; where that does not, by the settings that differ.
"""

import collections
import itertools
import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_flat.experiment import config as config_lib
from fedjax_flat.run import metrics, phases
from fedjax_flat.run.run_folder import RunFolder

# How long a run is and over which rounds it is averaged: free to change, but not the same number.
METHOD = "algorithm.name"
_COUNTS = ("rounds", "eval.window")


class Run(NamedTuple):
    """A run folder, as it was read."""

    path: str  # as it was given
    folder: RunFolder
    settings: dict[str, Any]  # those that it uses, by their full names
    records: list[dict[str, Any]]
    window: int

    @property
    def seed(self) -> tuple:
        """Its seeds."""
        return tuple(v for n, v in self.settings.items() if is_seed(n))


class Group(NamedTuple):
    """One run, or the seeds of one."""

    label: str
    runs: list[Run]

    @property
    def records(self) -> list[list[dict[str, Any]]]:
        """Of every seed."""
        return [run.records for run in self.runs]

    def window_mean(self, **selection) -> tuple[float, float, int]:
        """(mean, deviation, number of what it is over): seeds, if there are several; else rounds.

        A mean over seeds is that of the seeds' means over their last rounds.
        """
        found = [metrics.window_mean(r.records, r.window, **selection) for r in self.runs]
        if len(found) == 1:
            return found[0]
        means = np.array([mean for mean, _, _ in found])
        return float(means.mean()), float(means.std()), len(found)


def read(path: str | os.PathLike) -> Run:
    """A run folder; of phases, the settings of all and the records on one axis."""
    folder = RunFolder(path)
    config = folder.config()
    last = (folder.phases or [folder])[-1]
    window = (config if last is folder else last.config()).eval.window
    return Run(str(path), folder, config_lib.used(config), phases.records(folder), window)


def grouped(runs: Sequence[Run]) -> list[Group]:
    """The runs by groups, in the order of their first; a folder that is given twice counts once."""
    once: dict[str, Run] = {}
    for run in runs:
        once.setdefault(os.path.abspath(run.path), run)
    found: dict[Any, list[Run]] = {}
    for run in once.values():
        what, again = identity(run), 0
        while any(run.seed == other.seed for other in found.get((what, again), ())):
            again += 1
        found.setdefault((what, again), []).append(run)
    return [Group(n, g) for n, g in zip(_names(list(found.values())), found.values(), strict=True)]


def identity(run: Run) -> str:
    """What seeds have in common: the settings, and those of the run from which they started."""
    kept = {n: _without_seeds(v) for n, v in run.settings.items() if not is_seed(n)
            and (n in _COUNTS or not _is_free(n))}
    before = (run.folder.phases or [run.folder])[0].init()
    if before is not None:
        there = (before / "config.json").is_file()
        kept["--init"] = identity(read(before)) if there else str(before)
    return json.dumps(kept, sort_keys=True, default=str)


def differences(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """The settings, seeds apart, that are not the same in all groups; None where it has no effect.

    What only says how often one looks is left out.
    """
    all_names = dict.fromkeys(n for g in groups for n in g.runs[0].settings)
    found = {
        n: [g.runs[0].settings.get(n) for g in groups] for n in all_names
        if not is_seed(n) and (n in _COUNTS or not _is_free(n))
    }
    return {n: values for n, values in found.items() if any(v != values[0] for v in values)}


def unique_paths(paths: Sequence[str | os.PathLike]) -> list[str]:
    """Each path by as many of its last parts as tell it from the others."""
    parts = [pathlib.Path(os.path.abspath(path)).parts for path in paths]
    names = []
    for own in parts:
        others = [other for other in parts if other != own]
        length = next(
            (n for n in range(1, len(own)) if all(own[-n:] != other[-n:] for other in others)),
            len(own),
        )
        names.append(os.path.join(*own[-length:]))
    return names


def _names(groups: Sequence[Sequence[Run]]) -> list[str]:
    alone = unique_paths([group[0].path for group in groups])
    names = [_common_name([run.path for run in group]) if len(group) > 1 else short
             for group, short in zip(groups, alone, strict=True)]
    if twice := _repeated(names):
        labels = _by_settings(groups)
        names = [label if name in twice else name
                 for name, label in zip(names, labels, strict=True)]
    twice = _repeated(names)
    return [short if name in twice or not name else name
            for name, short in zip(names, alone, strict=True)]


def _by_settings(groups: Sequence[Sequence[Run]]) -> list[str]:
    """What differs; of that, where it suffices to tell them apart, only what is no default."""
    values = differences([Group("", list(group)) for group in groups])
    every = [{n: v[i] for n, v in values.items()} for i in range(len(groups))]
    known = config_lib.all_settings()
    chosen = [{n: v for n, v in own.items() if n == METHOD or n not in known
               or v != known[n].default} for own in every]
    short = [said(own) for own in chosen]
    return short if all(short) and not _repeated(short) else [said(own) for own in every]


def said(settings: Mapping[str, Any]) -> str:
    """'fedsam, rho 0.1': by the last part of settings' names, where it is one's alone."""
    last = collections.Counter(name.split(".")[-1] for name in settings)
    short = lambda name: end if last[end := name.split(".")[-1]] == 1 else name
    return ", ".join(
        str(value) if name == METHOD else f"{short(name)} {value}"
        for name, value in settings.items() if value is not None
    )


def _common_name(paths: Sequence[str]) -> str:
    parts = [pathlib.Path(os.path.abspath(path)).parts for path in paths]
    depth = next(i for i, level in enumerate(zip(*parts, strict=False)) if len(set(level)) > 1)
    letters = itertools.takewhile(
        lambda level: len(set(level)) == 1, zip(*(own[depth] for own in parts), strict=False)
    )
    stem = "".join(level[0] for level in letters)
    stem = re.sub(r"[\W_]*(seed|s)?[\W_]*\d*$", "", stem)
    return stem or parts[0][depth - 1]


def _repeated(names: Sequence[str]) -> set[str]:
    return {name for name, count in collections.Counter(names).items() if count > 1}


def is_seed(name: str) -> bool:
    """Whether a setting is one of chance alone."""
    return name.split(".")[-1] == "seed"


def _is_free(name: str) -> bool:
    return any(name == free or name.startswith(f"{free}.") for free in config_lib.FREE)


def _without_seeds(value: Any) -> Any:
    """Also of phases, which have settings of their own."""
    if isinstance(value, Mapping):
        return {n: _without_seeds(v) for n, v in value.items() if not is_seed(n)}
    return [_without_seeds(v) for v in value] if isinstance(value, list | tuple) else value
