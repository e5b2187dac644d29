"""Where metrics go beside metrics.jsonl: `--config.metrics.to=csv+tensorboard+wandb`.

    csv           metrics.csv: a line `round,split,model,name,value` for each number
    tensorboard   events in the folder tensorboard, named split/model/name (extra tensorboard)
    wandb         a run of Weights & Biases in the folder wandb, offline unless WANDB_MODE says
                  otherwise; `wandb sync` sends it (extra wandb). Every start is a run of its own,
                  in a group of the folder's name; they draw against `round`

A run that goes on drops in csv and tensorboard what will be written again. Only metrics.jsonl is
read back by this program.
"""

import contextlib
import csv
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import ml_collections

from fedjax_flat import disk, errors
from fedjax_flat.experiment import config as config_lib
from fedjax_flat.experiment import usage
from fedjax_flat.run.metrics import Logger

Record = dict[str, Any]


def begin(
    config: ml_collections.ConfigDict, folder: pathlib.Path, kept: Sequence[Record], start: int
) -> list[Logger]:
    """The loggers that `config` names; `kept` are the records up to round `start`."""
    with contextlib.ExitStack() as stack:  # one that cannot begin leaves none open
        found = []
        for name in usage.loggers(config):
            found.append(LOGGERS[name](config, folder, kept, start))
            stack.callback(found[-1].close)
        stack.pop_all()
    return found


def _numbers(record: Record) -> dict[str, float]:
    return {n: v for n, v in record.items() if isinstance(v, int | float) and n != "round"}


def _named(record: Record) -> dict[str, float]:
    """{'test/global/accuracy': 0.5, ...}."""
    where = f"{record['split']}/{record['model']}"
    return {f"{where}/{name}": value for name, value in _numbers(record).items()}


class _Csv:
    def __init__(self, config, folder: pathlib.Path, kept: Sequence[Record], start: int):
        del config, start
        path = folder / "metrics.csv"
        disk.write_atomically(path, "round,split,model,name,value\n")
        self._file = open(path, "a", newline="", opener=disk.no_link)  # noqa: SIM115 (see `close`)
        self._lines = csv.writer(self._file, lineterminator="\n")
        for record in kept:
            self.write(record)

    def write(self, record: Record) -> None:
        where = [record["round"], record["split"], record["model"]]
        self._lines.writerows([*where, n, repr(v)] for n, v in _numbers(record).items())

    def flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class _TensorBoard:
    def __init__(self, config, folder: pathlib.Path, kept: Sequence[Record], start: int):
        del config, kept
        try:
            import tensorboardX
        except ImportError as e:
            raise _missing("tensorboard", "tensorboardX") from e
        self._events = tensorboardX.SummaryWriter(
            str(folder / "tensorboard"), purge_step=start + 1 if start else 0
        )

    def write(self, record: Record) -> None:
        for name, value in _named(record).items():
            self._events.add_scalar(name, value, record["round"])

    def flush(self) -> None:
        self._events.flush()

    def close(self) -> None:
        self._events.close()


class _Wandb:
    def __init__(self, config, folder: pathlib.Path, kept: Sequence[Record], start: int):
        del kept
        try:
            import wandb
        except ImportError as e:
            raise _missing("wandb", "wandb") from e
        name = folder.absolute().name
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedjax_flat"), dir=str(folder), group=name,
            name=f"{name} from round {start}" if start else name,
            config=dict(config_lib.used(config)), mode=os.environ.get("WANDB_MODE", "offline"),
            settings=wandb.Settings(silent=True),
        )
        self._run.define_metric("*", step_metric="round")

    def write(self, record: Record) -> None:
        self._run.log({"round": record["round"], **_named(record)})

    def flush(self) -> None:
        """It writes by itself."""

    def close(self) -> None:
        self._run.finish()


def _missing(name: str, library: str) -> errors.UsageError:
    return errors.UsageError(
        f"config.metrics.to = {name} needs {library}: pip install 'fedjax-flat[{name}]'."
    )


LOGGERS: dict[str, Callable[..., Logger]] = {
    "csv": _Csv, "tensorboard": _TensorBoard, "wandb": _Wandb
}
