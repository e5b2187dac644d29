"""The run folder: everything needed to repeat a run and everything it produced.

    config.json        the settings
    environment.json   versions, devices, git revision, and every command that worked here
    origin.json        of a run that branched off another: which, at which round, its checkpoint's
                       hash
    partition.npz      who owned which example, with a content hash
    groups.npz         who trained in sequence with whom, at first, with a content hash
    groups.json        a hash of all groups, and the rounds in which there were others
    features.json      digests of what features are of, where these are the examples
    init.json          the run, or file of weights, with whose model this one began, if it did
    imports/           users' files that registered what the config names, as they were
    metrics.jsonl      one object per record
    clients.jsonl      each client's score, loss and output norm, where models met clients' examples
    checkpoints/       the whole state at the newest rounds
    figures/           pictures
    1_NAME/, 2_NAME/   of a run in phases (phases.py): a run folder for each; here, the settings of
                       all, the environment and the figure

Only checkpoints cannot be replaced. What else is lost or damaged is made again, from the mark's
copy (mark.py) or from the config given, or is done without: with a warning, never silently.
"""

import contextlib
import json
import logging
import os
import pathlib
import shutil
import warnings

import ml_collections

from fedjax_flat import disk, errors, plugins
from fedjax_flat.data import Partition
from fedjax_flat.disk import write_atomically
from fedjax_flat.experiment import config as config_lib
from fedjax_flat.experiment.features import Features
from fedjax_flat.experiment.grouping import Grouping
from fedjax_flat.ops import kernels
from fedjax_flat.run import environment, mark

logger = logging.getLogger("fedjax_flat")


class LostConfigError(errors.UsageError):
    """The settings of a run cannot be read; who gives them again can go on."""


class _DamagedError(Exception):
    """A file is not what it should be."""


class RunFolder:
    """Paths inside one run folder, and what is written once per start."""

    def __init__(self, path: str | os.PathLike):
        _check_name(os.fspath(path))
        self.path = disk.folder("run folder", path)
        self.config_file = self.path / "config.json"
        self.origin_file = self.path / "origin.json"
        self.environment_file = self.path / "environment.json"
        self.partition_file = self.path / "partition.npz"
        self.groups_file = self.path / "groups.npz"
        self.stages_file = self.path / "groups.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.clients_file = self.path / "clients.jsonl"
        self.features_file = self.path / "features.json"
        self.init_file = self.path / "init.json"
        self.checkpoints = self.path / "checkpoints"
        self.figures = self.path / "figures"
        self.imports = self.path / "imports"

    @property
    def phases(self) -> list["RunFolder"]:
        """The folders of the phases that are here, in their order."""
        return [RunFolder(path) for path in mark.phases(self.path)]

    def check_is_one(self) -> None:
        """Refuses a run in phases where one run is meant."""
        if phases := self.phases:
            raise errors.UsageError(
                f"{self.path} is a run in phases: choose one of them, "
                f"{', '.join(str(phase.path) for phase in phases)}."
            )

    def check_path(self) -> None:
        """Refuses a path at which orbax and tensorstore would not find what they wrote."""
        whole = os.path.abspath(self.path)
        wrong = next((c for c in whole if c in "*?[\\" or "\ud800" <= c <= "\udfff"), None)
        if wrong:
            raise errors.UsageError(
                f"run folder {whole}: {wrong!a} in its path; checkpoints there cannot be read "
                "back. Choose another name."
            )

    def config(self) -> ml_collections.ConfigDict:
        """The settings of the run that is here; imports the files that they need."""
        try:
            found = self._parsed(self.config_file.read_bytes())
        except (OSError, _DamagedError) as e:
            copy = self._copied_config()
            if copy is None:
                raise self._lost(e) from e
            warnings.warn(
                f"{self.config_file} cannot be read ({e}): the copy in {mark.MARK} is taken",
                stacklevel=2,
            )
            return copy
        copy = self._copied_config()
        changed = config_lib.differences(copy, found) if copy else []
        if changed:
            raise errors.UsageError(
                f"{self.config_file} is not what the run was trained with:\n  "
                + "\n  ".join(changed)
                + f"\nPut it back, or delete it, and the copy in {mark.MARK} is taken."
            )
        return found

    def _copied_config(self) -> ml_collections.ConfigDict | None:
        copy = mark.read(self.path).get("config")
        try:
            return self._parsed(json.dumps(copy)) if copy else None
        except _DamagedError:  # sound, but of another version
            return None

    def _parsed(self, text: str | bytes) -> ml_collections.ConfigDict:
        try:
            values = json.loads(text)
            files = [os.fspath(file) for file in values.get("imports", ())]
        except (ValueError, AttributeError, TypeError, RecursionError) as e:
            raise _DamagedError(e) from e
        values["imports"] = [self._import(i, file) for i, file in enumerate(files)]
        try:
            return config_lib.from_json(json.dumps(values))
        except (ValueError, LookupError, AttributeError, TypeError) as e:  # UsageError too
            raise _DamagedError(str(e).splitlines()[0]) from e

    def _lost(self, error: Exception) -> errors.UsageError:
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return errors.UsageError(
                f"{self.path} is not a run folder: it has no config.json. `fedjax-flat train "
                "--config FILE --run FOLDER` makes one."
            )
        return LostConfigError(
            f"{self.config_file} cannot be read as the settings of a run ({error}). If it was one, "
            "train with its whole config, --config FILE and what was set beside it; else choose "
            "another folder with --run."
        )

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
        recorded = environment.read(self.environment_file).get("imports", {})
        for file, copy in self._copies(config):
            content = pathlib.Path(file).read_bytes()
            if not copy.exists() or copy.read_bytes() == content:
                continue
            if recorded.get(file) == plugins.digest(pathlib.Path(file)):
                warnings.warn(f"{copy} is damaged and made again from {file}", stacklevel=3)
                continue
            text = (
                f"{file} has changed since {self.path} was trained with it; as it was it is {copy}."
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
        grouping: Grouping | None = None,
        allow_other_kernels: bool = False,
    ) -> None:
        """Marks the folder as ours, or checks that it belongs to this config and these clients."""
        with self.explained():
            if self.is_new():
                mark.write(self.path)
                self.init_file.unlink(missing_ok=True)  # of a start that failed
                if not self.origin_file.exists():
                    shutil.rmtree(self.checkpoints / "0", ignore_errors=True)  # see is_new
                partition.save(self.partition_file)
                if features:
                    text = json.dumps(features._asdict(), indent=2) + "\n"
                    write_atomically(self.features_file, text)
                if grouping:
                    self._save_groups(grouping)
                if init:
                    self._save_init(init)
            else:
                self._check_same(config, partition)
                self.check_partition(partition)
                self.check_features(features)
                self.check_groups(grouping)
                self.check_init(init)
                if not allow_other_kernels:
                    self.check_kernels()
            self.figures.mkdir(parents=True, exist_ok=True)

    def record(self, config: ml_collections.ConfigDict, partition: Partition | None) -> None:
        """Writes the settings and the environment of the run, or of the phases, that start now."""
        known = partition.content_hash if partition else ""
        with self.explained():
            for file, copy in self._copies(config):
                write_atomically(copy, pathlib.Path(file).read_bytes())
            text = config_lib.to_json(config)
            write_atomically(self.config_file, text)
            mark.write(self.path, partition=known, config=json.loads(text))
            environment.record(self.environment_file, known, config.imports)

    @contextlib.contextmanager
    def in_use(self):
        """Keeps other processes from training here; a killed one lets go by itself."""
        with contextlib.ExitStack() as stack:
            with self.explained():
                self.path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(disk.locked(
                    self.path / mark.LOCK,
                    f"another process is training in {self.path}. Wait for it, stop it, or choose "
                    "another folder with --run.",
                ))
            yield

    @contextlib.contextmanager
    def explained(self):
        """A disk that refuses, in one sentence with what is kept and what to do."""
        try:
            yield
        except errors.UsageError:
            raise
        except (OSError, ValueError) as e:
            said = disk.refusal(e, self.path)
            if said is None:
                raise
            raise errors.UsageError(
                f"cannot write to run folder {self.path}: {said}. {self.kept()} Free some space on "
                f"its disk{self._space()} or make it writable, and the same command goes on; or "
                "choose another folder with --run."
            ) from e

    def kept(self) -> str:
        """What there is to go on from."""
        rounds = self.saved_rounds
        if not rounds:
            return "There is no checkpoint yet."
        return f"The checkpoint of round {rounds[-1]} and the metrics up to it are kept."

    def _space(self) -> str:
        newest = [self.checkpoints / str(r) for r in self.saved_rounds[-1:]]
        size = sum(p.stat().st_size for n in newest for p in n.rglob("*") if p.is_file())
        return f" (a checkpoint takes {max(size / 1e6, 0.1):.1f} MB)" if newest else ""

    def is_new(self) -> bool:
        """Whether no run has begun here; refuses a folder that looks like one and is none."""
        if self.config_file.exists() or "config" in mark.read(self.path):
            return False
        if mark.is_marked(self.path):  # stopped before its settings were written, or they are lost
            return self.origin_file.exists() or self.saved_rounds in ([], [0])
        found = mark.ours(self.path)
        if found:
            raise errors.UsageError(
                f"{self.path} has {found[0].relative_to(self.path)} but is not a run of this "
                "program, or it has lost its config.json. Choose another folder with --run."
            )
        return True

    def _check_same(self, config: ml_collections.ConfigDict, partition: Partition) -> None:
        self.check_imports(config)
        try:
            before = self.config()
        except LostConfigError as e:
            if not mark.is_marked(self.path) and not self._has_clients_of(partition):
                raise
            disk.set_aside(self.config_file, f"cannot be read ({e.__cause__}) and is written anew "
                           "from the config given, which is compared with nothing")
            return
        changed = config_lib.differences(before, config)
        if changed:
            raise errors.UsageError(
                f"run folder {self.path} holds a run with another config:\n  "
                + "\n  ".join(changed)
                + "\nChoose another folder with --run, or delete this run with --fresh."
            )

    def _has_clients_of(self, partition: Partition) -> bool:
        try:
            return Partition.load(self.partition_file).content_hash == partition.content_hash
        except errors.UsageError:
            return False

    def check_partition(self, partition: Partition) -> None:
        """Refuses other clients than those that the run was trained with."""
        known: str | None
        try:
            known = Partition.load(self.partition_file).content_hash
        except errors.UsageError:
            records = mark.read(self.path), environment.read(self.environment_file)
            known = next((r["partition"] for r in records if r.get("partition")), None)
            what = "is damaged" if self.partition_file.exists() else "is missing"
            if known in (None, partition.content_hash):
                agrees = "as its recorded hash tells" if known else "but no hash of it is recorded"
                partition.save(self.partition_file)
                warnings.warn(
                    f"{self.partition_file} {what} and was made again, {agrees}", stacklevel=4
                )
                return
        if known and known != partition.content_hash:
            raise errors.UsageError(
                f"run folder {self.path} was trained with other clients (partition {known[:12]}, "
                f"now {partition.content_hash[:12]}): the data files or the partition code "
                "changed. Choose another folder with --run."
            )

    def _save_groups(self, grouping: Grouping) -> None:
        grouping.at(0).save(self.groups_file)
        stages = zip(grouping.starts.tolist(), grouping.counts.tolist(), strict=True)
        known = {"sha256": grouping.content_hash, "groups from round": list(stages)}
        write_atomically(self.stages_file, json.dumps(known) + "\n")

    def check_groups(self, grouping: Grouping | None) -> None:
        """Refuses other groups than those that the run was trained with."""
        if grouping is None:
            return
        try:
            known = json.loads(self.stages_file.read_bytes())["sha256"]
            Partition.load(self.groups_file)
        except (OSError, ValueError, KeyError, TypeError) as e:  # UsageError too
            self._save_groups(grouping)
            warnings.warn(f"{self.groups_file} cannot be read ({e}) and was made again, compared "
                          "with nothing", stacklevel=4)
            return
        if known != grouping.content_hash:
            raise errors.UsageError(
                f"run folder {self.path} was trained with other groups ({known[:12]}, now "
                f"{grouping.content_hash[:12]}): estimates of clients came out otherwise, or the "
                "code that makes groups changed. Choose another folder with --run."
            )

    def features(self) -> Features | None:
        """What the features were of that this run was trained on, if it was trained on features."""
        found = disk.told(self.features_file, Features._fields)
        return Features(**found) if found else None

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

    def init(self) -> pathlib.Path | None:
        """The run, or file of weights, with whose model this one began, if it did."""
        found = disk.told(self.init_file, ["run"])
        return pathlib.Path(os.path.abspath(self.path / str(found["run"]))) if found else None

    def _save_init(self, init: str | os.PathLike) -> None:
        write_atomically(self.init_file, json.dumps({"run": self._place(init)}) + "\n")

    def _place(self, run: str | os.PathLike) -> str:
        """Where a run is, as init.json says it: of the phase before, so that both can be moved."""
        whole, here = pathlib.Path(os.path.abspath(run)), pathlib.Path(os.path.abspath(self.path))
        phases = mark.phases(here.parent) if whole.parent == here.parent else []
        return f"../{whole.name}" if whole in phases else str(whole)

    def check_init(self, init: str | os.PathLike | None) -> None:
        """Refuses another run to begin with than that with which this one began."""
        began = self.init()
        if init and not began and self.init_file.exists():
            self._save_init(init)  # damaged, and given again
        elif init and pathlib.Path(os.path.abspath(init)) != began:
            raise errors.UsageError(
                f"{self.path} began with {f'the model of {began}' if began else 'its own model'}, "
                f"not with that of {init}: --init counts before the first round only. Leave it "
                "out, or choose another folder with --run."
            )

    def check_kernels(self) -> None:
        """Refuses other compiled convolutions than those that the run was trained with."""
        before = environment.read(self.environment_file).get("kernels")
        if before not in (None, kernels.name()):
            raise errors.UsageError(
                f"{self.path} was trained with convolutions of {before}; here they are "
                f"{kernels.name()}, so that the bits would differ. {kernels.SWITCH} chooses, "
                "--allow-other-kernels goes on all the same."
            )

    @property
    def saved_rounds(self) -> list[int]:
        """Rounds with a checkpoint, oldest first."""
        return sorted(int(p.name) for p in self.checkpoints.glob("*") if p.name.isdigit())

    def can_be_deleted(self) -> bool:
        """Whether there is a run; refuses a folder that holds anything else."""
        with self.explained():
            return mark.check(self.path)

    def contents(self) -> str:
        """One line on what would be lost with this run."""
        phases = self.phases
        folders = [self.path, *(phase.path for phase in phases)]
        ours = [q for f in folders for p in mark.ours(f) for q in (p, *p.rglob("*")) if q.is_file()]
        rounds = (phases[-1] if phases else self).saved_rounds
        state = f"a run up to round {rounds[-1]}" if rounds else "a run without a checkpoint"
        if phases:
            state += f" of phase {phases[-1].path.name}"
        return f"{state} ({len(ours)} files)"

    def delete(self) -> None:
        """Removes the run, and only what belongs to it; who calls holds the lock (`in_use`)."""
        for phase in self.phases:
            with phase.in_use():
                phase.delete()
                if [p.name for p in phase.path.iterdir()] == [mark.LOCK]:
                    (phase.path / mark.LOCK).unlink()
                    phase.path.rmdir()
        left = mark.delete(self.path)
        if left:
            logger.warning("left in %s, as this program did not write it: %s", self.path,
                           ", ".join(left))


def _check_name(path: str) -> None:
    """Refuses what cannot be a folder."""
    if not path or "\0" in path:
        raise errors.UsageError(
            f"run folder {path!r}: expected a path, e.g. runs/a (. is the current folder)."
        )
    longest = max(path.split("/"), key=len)
    if len(os.fsencode(longest)) > 255:
        raise errors.UsageError(
            f"run folder {longest[:20]}...: a name of {len(longest)} letters is too long. Choose "
            "one of at most 255."
        )

