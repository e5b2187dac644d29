"""The run folder: everything needed to repeat a run and everything it produced.

    config.json        the settings
    environment.json   versions, devices, git revision, and every command that worked here
    partition.npz      who owned which example, with a content hash
    features.json      digests of what features are of, where these are the examples
    init.json          the run with whose model this one began, if it did
    imports/           users' files that registered what the config names, as they were
    metrics.jsonl      one object per record
    clients.jsonl      each client's score, loss and output norm, where models met clients' examples
    checkpoints/       the whole state at the newest rounds
    figures/           pictures
"""

import contextlib
import datetime
import fcntl
import importlib.metadata
import json
import logging
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys
import warnings

import jax
import ml_collections

from fedjax_flat import errors, plugins
from fedjax_flat.data import Partition
from fedjax_flat.experiment import config as config_lib
from fedjax_flat.experiment.features import Features
from fedjax_flat.ops import kernels
from fedjax_flat.version import __version__

logger = logging.getLogger("fedjax_flat")
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "scikit-learn")


class RunFolder:
    """Paths inside one run folder, and what is written once per start."""

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path)
        self.config_file = self.path / "config.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.clients_file = self.path / "clients.jsonl"
        self.features_file = self.path / "features.json"
        self.init_file = self.path / "init.json"
        self.checkpoints = self.path / "checkpoints"
        self.figures = self.path / "figures"
        self.imports = self.path / "imports"

    def config(self) -> ml_collections.ConfigDict:
        """The settings of the run that is here; imports the files that they need."""
        try:
            values = json.loads(self.config_file.read_text())
            values["imports"] = [
                self._import(i, file) for i, file in enumerate(values.get("imports", ()))
            ]
            return config_lib.from_json(json.dumps(values))
        except FileNotFoundError:
            raise errors.UsageError(
                f"{self.path} is not a run folder: it has no config.json. `fedjax-flat train "
                "--config FILE --run FOLDER` makes one."
            ) from None
        except errors.UsageError:
            raise
        except (ValueError, KeyError, AttributeError, TypeError) as e:
            raise errors.UsageError(f"{self.config_file} cannot be read: {e}") from e

    def _import(self, i: int, file: str) -> str:
        """Runs an imported file, or finds that another of the same content was run."""
        if pathlib.Path(file).is_file():
            if plugins.loaded(plugins.digest(pathlib.Path(file))) is None:
                logger.warning("%s was trained with %s, which is run now", self.path, file)
            return plugins.load(file)
        copy = self.imports / f"{i}_{pathlib.Path(file).name}"
        moved = plugins.loaded(plugins.digest(copy)) if copy.is_file() else None
        if moved is None:
            raise errors.UsageError(
                f"{self.path} was trained with {file}, which is missing. Put it back (as it was it "
                f"is in {self.imports}), or train once with --import NEWPLACE."
            )
        return moved

    def check_imports(self, config: ml_collections.ConfigDict, *, warn: bool = False) -> None:
        """Refuses, or warns of, an imported file that is not the one the run was trained with."""
        for file, copy in self._copies(config):
            if copy.exists() and copy.read_bytes() != pathlib.Path(file).read_bytes():
                text = (
                    f"{file} has changed since {self.path} was trained with it; as it was it is "
                    f"{copy}."
                )
                if not warn:
                    raise errors.UsageError(f"{text} Put it back, or train in another folder.")
                warnings.warn(text, stacklevel=3)

    def _copies(self, config: ml_collections.ConfigDict) -> list[tuple[str, pathlib.Path]]:
        return [(f, self.imports / f"{i}_{pathlib.Path(f).name}")
                for i, f in enumerate(config.imports)]

    def open(
        self,
        config: ml_collections.ConfigDict,
        partition: Partition,
        *,
        features: Features | None = None,
        init: str | os.PathLike | None = None,
        allow_other_kernels: bool = False,
    ) -> None:
        """Makes the folder, or checks that it belongs to this config, clients and features."""
        with self._explained():
            self.figures.mkdir(parents=True, exist_ok=True)
            if self.config_file.exists():
                self._check_same(config, partition)
                self.check_features(features)
                self._check_init(init)
                if not allow_other_kernels:
                    self._check_kernels()
            else:
                partition.save(self.path / "partition.npz")
                if features:
                    text = json.dumps(features._asdict(), indent=2) + "\n"
                    write_atomically(self.features_file, text)
                if init:
                    write_atomically(self.init_file, json.dumps({"run": _whole(init)}) + "\n")

    def record(self, config: ml_collections.ConfigDict, partition: Partition) -> None:
        """Writes the settings and the environment of the run that starts now."""
        with self._explained():
            for file, copy in self._copies(config):
                copy.parent.mkdir(exist_ok=True)
                write_atomically(copy, pathlib.Path(file).read_text())
            write_atomically(self.config_file, config_lib.to_json(config))
            self._record_environment(config, partition)

    @contextlib.contextmanager
    def in_use(self):
        """Keeps other processes from training here; a killed one lets go by itself."""
        with open(self.path / ".lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise errors.UsageError(
                    f"another process is training in {self.path}. Wait for it, stop it, or choose "
                    "another folder with --run."
                ) from None
            yield

    @contextlib.contextmanager
    def _explained(self):
        try:
            yield
        except OSError as e:
            raise errors.UsageError(
                f"cannot write to run folder {self.path}: {e.strerror or e}. Choose another with "
                "--run."
            ) from e

    def _check_same(self, config: ml_collections.ConfigDict, partition: Partition) -> None:
        self.check_imports(config)
        changed = config_lib.differences(self.config(), config)
        if changed:
            raise errors.UsageError(
                f"run folder {self.path} holds a run with another config:\n  "
                + "\n  ".join(changed)
                + "\nChoose another folder with --run, or delete this run with --fresh."
            )
        saved = Partition.load(self.path / "partition.npz")
        if saved.content_hash != partition.content_hash:
            raise errors.UsageError(
                f"run folder {self.path} was trained with other clients (partition "
                f"{saved.content_hash[:12]}, now {partition.content_hash[:12]}): the data files or "
                "the partition code changed. Choose another folder with --run."
            )

    def features(self) -> Features | None:
        """What the features were of that this run was trained on, if it was trained on features."""
        if not self.features_file.exists():
            return None
        return Features(**json.loads(self.features_file.read_text()))

    def check_features(self, now: Features | None) -> None:
        """Refuses features of another network, or of other data, than the run was trained on."""
        before = self.features()
        if now == before or now is None or before is None:
            return
        (name, a, b) = next(x for x in zip(now._fields, before, now, strict=True) if x[1] != x[2])
        what = {"weights": "weights: model.pretrained names another file than then, or the network "
                           "has changed", "how": "preprocessing or another network"}
        raise errors.UsageError(
            f"run folder {self.path} was trained on features of other "
            f"{what.get(name, f'{name} examples')} ({a[:12]}, now {b[:12]}). Put back what it was, "
            "or choose another folder with --run."
        )

    def _check_init(self, init: str | os.PathLike | None) -> None:
        began = self.init_file.exists() and json.loads(self.init_file.read_text())["run"]
        if init and _whole(init) != began:
            raise errors.UsageError(
                f"{self.path} began with {f'the model of {began}' if began else 'its own model'}, "
                f"not with that of {init}: --init counts before the first round only. Leave it "
                "out, or choose another folder with --run."
            )

    def _check_kernels(self) -> None:
        file = self.path / "environment.json"
        before = json.loads(file.read_text()).get("kernels") if file.exists() else None
        if before not in (None, kernels.name()):
            raise errors.UsageError(
                f"{self.path} was trained with convolutions of {before}; here they are "
                f"{kernels.name()}, so that the bits would differ. {kernels.SWITCH} chooses, "
                "--allow-other-kernels goes on all the same."
            )

    def _record_environment(
        self, config: ml_collections.ConfigDict, partition: Partition
    ) -> None:
        path = self.path / "environment.json"
        program = pathlib.Path(sys.argv[0]).name.replace("__main__.py", "python -m fedjax_flat")
        commands = json.loads(path.read_text())["commands"] if path.exists() else []
        commands.append(
            {
                "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "command": shlex.join([*program.split(), *sys.argv[1:]]),
            }
        )
        environment = {
            "versions": {
                "fedjax_flat": __version__,
                "python": platform.python_version(),
                **{name: importlib.metadata.version(name) for name in LIBRARIES},
            },
            "devices": [f"{d.platform}:{d.device_kind}" for d in jax.devices()],
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
            "kernels": kernels.name(),
            "git": git_revision(),
            "partition": partition.content_hash,
            "imports": {file: plugins.digest(pathlib.Path(file)) for file in config.imports},
            "commands": commands,
        }
        write_atomically(path, json.dumps(environment, indent=2) + "\n")

    def contents(self) -> str:
        """One line on what would be lost with this folder."""
        rounds = sorted(int(p.name) for p in self.checkpoints.glob("*") if p.name.isdigit())
        files = sum(1 for p in self.path.rglob("*") if p.is_file())
        state = f"a run up to round {rounds[-1]}" if rounds else "a run without a checkpoint"
        return f"{state} ({files} files)"

    def delete(self) -> None:
        """Removes a run; refuses a folder that is not one."""
        if not self.path.exists():
            return
        if not self.config_file.exists():
            if not any(self.path.iterdir()):
                return
            raise errors.UsageError(
                f"{self.path} is not a run folder (no config.json): refused to delete it."
            )
        shutil.rmtree(self.path)


def _whole(run: str | os.PathLike) -> str:
    return str(pathlib.Path(run).absolute())


def write_atomically(path: pathlib.Path, text: str) -> None:
    """The file has the old text or the new one, never a part."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(partial, path)


def git_revision() -> str:
    """The revision of the source, with '+' when it was changed; '' outside a checkout."""
    here = pathlib.Path(__file__).parent

    def git(*args):
        out = subprocess.run(["git", "-C", here, *args], capture_output=True, text=True, check=True)
        return out.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""
