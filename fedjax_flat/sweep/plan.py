"""What a sweep asks, and the cells that answer it.

A sweep file is Python, run as a config file is, with a function `get_sweep()`:

    def get_sweep():
        return ff.Sweep(
            rows={"FedAvg": {}, "FedASAM": {"algorithm.name": "fedasam"}},  # lines of the table
            tune={"client.learning_rate": (0.1, 0.03)},  # chosen for each row, on validation
            seeds=3,
            config="configs/fedsam.py:cifar10,alpha=0.05",  # what all cells start from
        )

A row is a config, the name of a config file with its options, or settings that differ. A cell is a
row with one value of every tuned setting and one seed; its config is whole and checked before any
cell starts, and it lies in FOLDER/cells/ROW/SETTINGS/seedN, a run folder like any other.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_collections

from fedjax_flat import config_files, errors
from fedjax_flat.experiment import config as config_lib

Row = Any  # the name of a config file, a config, or the settings that differ, by name
RULES = ("none", "median", "halving")


@dataclass(frozen=True)
class Sweep:
    """Rows of a table, what is tuned for each, seeds, and when a cell is given up."""

    rows: Mapping[str, Row]
    tune: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    seeds: int | Sequence[int] = 3
    config: Row = field(default_factory=dict)
    choose_by: str = "validation"  # the split on which tuned settings are compared
    stop: str = "none"  # median: below the others' median; halving: not in the upper 1 / eta
    stop_after: int = 10  # rounds before a cell may be stopped, the first rung of halving
    eta: int = 3  # of halving
    attempts: int = 2  # of a cell that fails


@dataclass(frozen=True)
class Cell:
    """One run: its name is its folder's, under cells/."""

    name: str
    row: str
    tuned: Mapping[str, Any]
    seed: int
    config: ml_collections.ConfigDict

    @property
    def group(self) -> str:
        """All seeds of it."""
        return self.name.rpartition("/")[0]


def load(path: str) -> Sweep:
    """The sweep of FILE, or of FILE:OPTIONS, which runs that file."""
    sweep = config_files.run_file(path, "get_sweep", "sweep file")
    if not isinstance(sweep, Sweep):
        raise errors.UsageError(
            f"get_sweep() of {path} returns {type(sweep).__name__}: expected fedjax_flat.Sweep."
        )
    return sweep


def cells(sweep: Sweep) -> list[Cell]:
    """Every cell, with a config that was checked."""
    _check(sweep)
    seeds = range(sweep.seeds) if isinstance(sweep.seeds, int) else sweep.seeds
    found: dict[str, Cell] = {}
    for label, row in sweep.rows.items():
        for values in itertools.product(*sweep.tune.values()):
            tuned = dict(zip(sweep.tune, values, strict=True))
            for seed in seeds:
                words = ",".join(f"{k.rpartition('.')[2]}={v}" for k, v in tuned.items())
                name = "/".join(map(_word, (label, words or "all", f"seed{seed}")))
                config = _config(sweep.config, row, {**tuned, "seed": seed}, f"{label!r}")
                if name in found:
                    raise errors.UsageError(
                        f"two cells of the sweep would be {name}: rename one of its rows, or leave "
                        "a value out that is there twice."
                    )
                found[name] = Cell(name, label, tuned, seed, config)
    return list(found.values())


def _check(sweep: Sweep) -> None:
    if not sweep.rows:
        raise errors.UsageError("a sweep without rows: expected one name and config at least.")
    for name, values in sweep.tune.items():
        if isinstance(values, str) or not len(list(values)):
            raise errors.UsageError(
                f"tune[{name!r}] = {values!r}: expected a list of values, e.g. (0.1, 0.01)."
            )
    if isinstance(sweep.seeds, int):
        errors.at_least("seeds", sweep.seeds, 1)
    errors.lookup("stop rule", sweep.stop, dict.fromkeys(RULES))
    errors.at_least("stop_after", sweep.stop_after, 1)
    errors.at_least("eta", sweep.eta, 2)
    errors.at_least("attempts", sweep.attempts, 1)


def _config(base: Row, row: Row, settings: Mapping[str, Any], where: str):
    """Row over base over the default, then settings; checked whole."""
    if isinstance(row, Mapping) and not isinstance(row, ml_collections.ConfigDict):
        config, changes = _started(base), {**row, **settings}
    else:
        config, changes = _started(row), dict(settings)
    known = config_lib.all_settings()
    for name, value in changes.items():
        if name not in known:
            raise errors.UsageError(f"row {where}: {config_lib.unknown(name)}")
        try:
            config.update_from_flattened_dict({name: value})
        except (TypeError, ValueError) as e:
            raise errors.UsageError(f"row {where}: {name} = {value!r}: {e}") from e
    try:
        config_lib.validate(config)
    except errors.UsageError as e:
        raise errors.UsageError(f"row {where}: {e}") from e
    return config


def _started(row: Row):
    if isinstance(row, str):
        return config_files.load_config(row, [], None)
    if isinstance(row, ml_collections.ConfigDict):
        return ml_collections.ConfigDict(row.copy_and_resolve_references()).lock()
    config = config_lib.default_config()
    for name, value in row.items():
        if name not in config_lib.all_settings():
            raise errors.UsageError(config_lib.unknown(name))
        config.update_from_flattened_dict({name: value})
    return config


def _word(text: str) -> str:
    """A name of a folder, of whatever text."""
    return re.sub(r"[^\w.,=+()-]+", "_", text).strip(".") or "_"
