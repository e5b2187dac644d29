"""Experiments one after the other on the same clients, each starting where the one before ended.

Fani's thesis joins the phases of a federated system with a plus: Fed3R + FedAvg(head) is a
classifier in closed form, then trained further (chapter 3); its chapter 4 has four of them. Here a
config has them as a list, `config.phases`. An entry is a name and the settings that are the
phase's own; all the others are common:

    config.phases = (
        {"name": "fed3r", "algorithm.name": "fed3r", "data.features": True, "rounds": 10},
        {"name": "fedavg(head)", "client.frozen": "features", "client.learning_rate": 0.01},
    )

`pipeline` makes that of whole configs. A phase is an experiment as any other, so whatever an
experiment can be, a phase can be, in any order, with two exceptions. Clients and examples are the
same in all phases. And `data.features` go with the network as the config starts it, so none can
have them after a phase that had not: there `client.frozen=features`, or a closed form as it is,
runs the network that was trained.

A closed form after trained phases makes a new classifier for their features. Own parts of clients
go on from phase to phase as long as clients have any; a phase without starts from what the server
has.
"""

import itertools
import logging
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import jax
import ml_collections
import numpy as np

from fedjax_flat import errors, parts, rng
from fedjax_flat.algorithms.personal import owned, with_owned
from fedjax_flat.data import SOURCES, Partition
from fedjax_flat.engine.round import TrainState
from fedjax_flat.experiment import config as config_lib
from fedjax_flat.experiment import usage
from fedjax_flat.experiment.assembly import Experiment
from fedjax_flat.experiment.features import weights_digest
from fedjax_flat.models import Variables, fitting

Config: TypeAlias = ml_collections.ConfigDict
logger = logging.getLogger("fedjax_flat")
# Who the clients are, and what they have.
COMMON = (
    "phases", "imports", "data.name", "data.validation", "data.validation_from", "data.unlabelled",
    "data.labelled", "data.imbalance", "data.local_test", "data.closed", "partition.",
)


def validate(config: Config) -> None:
    """Raises a UsageError for the first setting that cannot work, or has no effect, in a phase."""
    if config.get("phases"):
        phase_configs(config)
    else:
        config_lib.validate(config)


def phase_configs(config: Config) -> dict[str, Config]:
    """Every phase's config, valid, by its name and in their order."""
    config_lib.SETTINGS["phases"].check("config.phases", config.phases)
    _check_names(config.phases)
    found = {phase["name"]: _config_of(config, phase) for phase in config.phases}
    _check_common(config, found)
    for before, after in itertools.pairwise(found):
        if found[after].data.features and not found[before].data.features:
            raise errors.UsageError(
                f"phase {after} has data.features after phase {before}, which has not: features "
                "are of the network as the first phase starts it, and it has been trained since. "
                f"Leave them out of {after}; client.frozen = 'features' trains the head alone."
            )
    return found


def pipeline(phases: Mapping[str, Config]) -> Config:
    """One config of several: what all that use a setting agree on is common, the rest their own."""
    every = {name: config_lib.used(config) for name, config in phases.items()}
    settings = dict.fromkeys(n for values in every.values() for n in values)
    common = {}
    for setting in settings:
        values = [v[setting] for v in every.values() if setting in v]
        if all(v == values[0] for v in values):
            common[setting] = values[0]
    joined = config_lib.from_flat(common)
    joined.phases = tuple(
        {"name": name, **{n: v for n, v in values.items() if n not in common}}
        for name, values in every.items()
    )
    _check_names(joined.phases)
    return joined


def read_phases(
    text: str, methods: Iterable[str], parts_of_model: Iterable[str]
) -> dict[str, tuple[str, str]]:
    """'fed3r+fedavg(head)' as {'fed3r': ('fed3r', ''), 'fedavg(head)': ('fedavg', 'head')}."""
    found: dict[str, tuple[str, str]] = {}
    for name in text.split("+"):
        words = re.fullmatch(r"(\w+)(?:\((\w+)\))?", name)
        if not words:
            raise errors.UsageError(
                f"phases = {text!r}: {name!r} is no phase. Expected phases joined by +, e.g. "
                "fed3r+fedavg(head)."
            )
        method, part = words[1], words[2] or ""
        errors.lookup("phase", method, dict.fromkeys(methods))
        if part:
            errors.lookup("part of the model", part, dict.fromkeys(parts_of_model))
        if name in found:
            raise errors.UsageError(f"phases = {text!r} has {name} twice. Leave one out.")
        found[name] = method, part
    return found


def entry(config: Config, phase: str) -> int:
    """Which of `config.phases` is meant, by its name or its number, 1 for the first."""
    names = [p["name"] for p in config.phases]
    numbers = {str(i): i - 1 for i in range(1, len(names) + 1)}
    if phase in numbers:
        return numbers[phase]
    if not names:
        raise errors.UsageError(f"there is no phase {phase!r}: config.phases is empty.")
    return names.index(phase) if phase in names else errors.lookup("phase", phase, {
        name: i for i, name in enumerate(names)
    })


def hand_over(
    built: Experiment, before: Experiment, ended: TrainState, run: str | os.PathLike
) -> TrainState:
    """The state with which `built` starts where experiment `before`, in folder `run`, `ended`.

    Its model is the global model of `ended`: all of it, if that trained the whole network; the
    classifier, if it was trained on features and the network here is the one they are of, as the
    digest of its weights says. Where clients have own parts in both, they go on with theirs. All
    else is as at the start of any run: round 0, the key of `config.seed`, fresh optimisers,
    averages and client state.
    """
    state = built.init(_model(built, before, before.models(ended)["global"], run))
    ours, theirs = owned(state.clients), owned(ended.clients)
    if not (ours and theirs):
        return state
    if lost := sorted(theirs.keys() - ours.keys()):
        raise errors.UsageError(
            f"cannot start from {run}: its clients have their own {lost[0]} ({len(lost)} such), "
            f"which {built.config.algorithm.name} here would take from the server. Expected them "
            "among clients' own parts: name them in algorithm.fp.keep, or in the method's own."
        )
    if not _same(built.partition, before.partition):
        raise errors.UsageError(
            f"cannot start from {run}: its clients have own parts, and they are not those here. "
            "Expected the same data and partition.*."
        )
    return state._replace(clients=with_owned(state.clients, theirs))


def from_file(built: Experiment, path: str | os.PathLike) -> TrainState:
    """The state of `built` before its first round, with the weights of a file.

    Each is checked for its name and shape; a classifier of another width is left out, and is fresh.
    """
    key = rng.fold(jax.random.key(built.config.seed), "init")
    fresh = jax.jit(built.task.init)(key)
    found = fitting(jax.eval_shape(built.task.init, key), path)
    if left := len(parts.take(fresh, lambda name: name not in found)):
        logger.info("%d of the model's arrays are not in %s, and are fresh", left, path)
    return built.init(parts.put(fresh, found))


def _same(a: Partition, b: Partition) -> bool:
    return np.array_equal(a.indices, b.indices) and np.array_equal(a.offsets, b.offsets)


def _model(built: Experiment, before: Experiment, model: Variables, run: Any) -> Variables:
    key = rng.fold(jax.random.key(built.config.seed), "init")
    fresh = jax.jit(built.task.init)(key)
    ours, theirs = (parts.take(v, lambda name: True) for v in (fresh, model))
    if unknown := sorted(theirs.keys() - ours.keys()):
        raise _refused(run, f"has {unknown[0]} ({len(unknown)} such), which this model lacks")
    for name, leaf in theirs.items():
        if leaf.shape != ours[name].shape:
            raise _refused(run, f"has {name} of shape {leaf.shape}; here it is {ours[name].shape}")
    missing = sorted(ours.keys() - theirs.keys())
    _check_features(built, before, fresh, missing, run)
    return parts.put(fresh, theirs)


def _check_features(
    built: Experiment, before: Experiment, fresh: Any, missing: list[str], run: Any
) -> None:
    of = before.features
    if missing and of is None:
        raise _refused(run, f"lacks {missing[0]} ({len(missing)} such)")
    if of is None and built.features is None:
        return
    here = built.features.weights if built.features else weights_digest(fresh)
    if of is None or of.weights != here:
        there = of.weights[:12] if of else "its own"
        raise _refused(
            run, f"reads features of other weights ({there}, here {here[:12]}), so that its "
            "classifier is of no use here", "model.pretrained, model.norm and seed as they were",
        )


def _refused(run: Any, what: str, expected: str = "the same model.*, data and classes"):
    return errors.UsageError(
        f"cannot start from {run}: its model {what}. Expected {expected}."
    )


def _check_names(phases: tuple[dict[str, Any], ...]) -> None:
    seen: list[str] = []
    if not phases:
        raise errors.UsageError("there is no phase: expected one or more, e.g. fed3r.")
    for i, phase in enumerate(phases, 1):
        name = phase.get("name")
        if not isinstance(name, str) or not re.fullmatch(r"(?!\d+$)[\w()+-]{1,60}", name):
            raise errors.UsageError(
                f"phase {i} has the name {name!r}: expected one of letters, digits, _, -, + and "
                "brackets, not a number alone, e.g. {'name': 'fedavg(head)', ...}."
            )
        if name in seen:
            raise errors.UsageError(f"two phases have the name {name!r}. Give one another name.")
        seen.append(name)


def _config_of(config: Config, phase: dict[str, Any]) -> Config:
    """One phase's config; the settings that are its own must have an effect there."""
    name, own = phase["name"], {n: v for n, v in phase.items() if n != "name"}
    try:
        for setting in own:
            if setting not in config_lib.all_settings():
                raise errors.UsageError(config_lib.unknown(setting))
            # Which examples are left out is drawn with the seed.
            drawn = setting == "seed" and config.data.imbalance != "none"
            if drawn or _is_common(setting):
                raise errors.UsageError(
                    f"config.{setting} cannot be of one phase: clients and examples are the same "
                    "in all. Set it for all; or train a run of its own with --init."
                )
        whole, default = config_lib.of_phase(config, phase), config_lib.default_config()
        choices, usual = config_lib.settings_of(whole), config_lib.flatten(default)
        for setting, value in own.items():
            why = usage.why_unused(setting, whole, choices)
            if why and value != usual[setting]:
                raise errors.UsageError(
                    f"config.{setting} = {value!r} would change nothing: {why}. Leave it out."
                )
        found = config_lib.only_used(whole)
        config_lib.validate(found)
    except (errors.UsageError, TypeError) as e:
        raise errors.UsageError(f"phase {name}: {e}") from e
    return found


def _is_common(setting: str) -> bool:
    of_sources = {f"data.{n}" for source in SOURCES.values() for n in source.settings}
    return setting in of_sources or any(
        setting == name or (name.endswith(".") and setting.startswith(name)) for name in COMMON
    )


def _check_common(config: Config, found: Mapping[str, Config]) -> None:
    """Refuses a common setting that no phase takes over."""
    usual = config_lib.flatten(config_lib.default_config())
    used = {name: config_lib.used(each) for name, each in found.items()}
    for setting, value in config_lib.flatten(config).items():
        if setting == "phases" or value == usual.get(setting):
            continue
        users = [p for p in config.phases if setting in used[p["name"]]]
        if all(setting in phase for phase in users):
            why = "no phase uses it" if not users else (
                "every phase that uses it has its own. Change those: "
                + ", ".join(f"--config.phases.{p['name']}.{setting}" for p in users)
            )
            raise errors.UsageError(f"config.{setting} = {value!r} would change nothing: {why}.")
