"""Folders that tensorflow-datasets prepared: found, and prepared where TensorFlow is installed.

ROOT/NAME/[CONFIG/]VERSION/dataset_info.json, where ROOT is FOLDER/tensorflow_datasets/, FOLDER
itself, or what TFDS_DATA_DIR says.
"""

import contextlib
import importlib.util
import json
import os
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

from fedjax_flat import errors
from fedjax_flat.data.sources.base import DATA_VARIABLE

FORMAT = "array_record"  # the only one that is read without TensorFlow
_VERSION = r"\d+\.\d+\.\d+"


@contextlib.contextmanager
def damage_named(argument: str, path: pathlib.Path) -> Iterator[None]:
    """Says which folder to delete when tensorflow-datasets cannot read what it wrote."""
    try:
        yield
    except errors.UsageError:
        raise
    except (OSError, RuntimeError, ValueError) as e:
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise errors.UsageError(
            f"tfds:{argument}: {path} is damaged or incomplete ({reason}). Delete that folder and "
            "prepare it again."
        ) from e


class Prepared(NamedTuple):
    """One prepared data set; no config is ''."""

    name: str
    config: str
    version: str
    path: pathlib.Path

    @property
    def formats(self) -> tuple[str, ...]:
        """What its files are."""
        with damage_named(self.name, self.path):
            info = json.loads((self.path / "dataset_info.json").read_text())
        return info.get("fileFormat", "tfrecord"), *info.get("alternativeFileFormats", ())


class Wanted(NamedTuple):
    """NAME[/CONFIG][:VERSION], as tensorflow-datasets writes it."""

    name: str
    config: str
    version: str

    @classmethod
    def parse(cls, argument: str) -> "Wanted":
        """Of what stands after `tfds:`."""
        match = re.fullmatch(rf"(\w+)(?:/([^/:]+))?(?::({_VERSION}))?", argument)
        if not match:
            raise errors.UsageError(
                f"tfds:{argument}: expected tfds:NAME, tfds:NAME/CONFIG or tfds:NAME:VERSION, e.g. "
                "tfds:mnist:3.0.1."
            )
        return cls(*(part or "" for part in match.groups()))


def roots(data_dir: pathlib.Path | None) -> list[pathlib.Path]:
    """Where prepared data sets may lie, of those folders that are there."""
    variable = os.environ.get("TFDS_DATA_DIR")
    places = [data_dir / "tensorflow_datasets", data_dir] if data_dir else []
    places += [pathlib.Path(variable).expanduser()] if variable else []
    return [p for p in places if p.is_dir()]


def prepared(root: pathlib.Path, name: str = "*") -> list[Prepared]:
    """Every data set of that name in `root`, the oldest version first."""
    found = []
    for depth in ("*", "*/*"):
        for info in root.glob(f"{name}/{depth}/dataset_info.json"):
            parts = info.parent.relative_to(root).parts
            if re.fullmatch(_VERSION, parts[-1]):
                found.append(Prepared(parts[0], "/".join(parts[1:-1]), parts[-1], info.parent))
    number = lambda p: tuple(map(int, p.version.split(".")))
    return sorted(found, key=lambda p: (p.name, p.config, number(p)))


def is_here(data_dir: pathlib.Path | None) -> bool:
    """Whether there is any."""
    return any(prepared(root) for root in roots(data_dir))


def find(argument: str, data_dir: pathlib.Path | None) -> Prepared:
    """The newest version of what is wanted, readable here, or an error that says what is there."""
    wanted = Wanted.parse(argument)
    how = f"To prepare it: fedjax-flat prepare tfds:{argument} --data {data_dir or 'FOLDER'}"
    places = roots(data_dir)
    of_name = next((p for p in (prepared(r, wanted.name) for r in places) if p), [])
    if not of_name:
        names = sorted({p.name for root in places for p in prepared(root)})
        there = f"{' and '.join(map(str, places))} holds {', '.join(names) or 'none'}"
        raise errors.UsageError(
            f"tfds:{argument} is not prepared: {there if places else 'no data folder'}; expected "
            "tensorflow_datasets/NAME/[CONFIG/]VERSION/ in the folder of --data or "
            f"{DATA_VARIABLE}.{errors.did_you_mean(wanted.name, names)} {how}"
        )
    configs = sorted({p.config for p in of_name})
    config = configs[0] if len(configs) == 1 and not wanted.config else wanted.config
    if config not in configs:
        raise errors.UsageError(
            f"tfds:{argument}: prepared are {', '.join(f'{wanted.name}/{c}' for c in configs)}: "
            f"expected one of those.{errors.did_you_mean(config, configs)} {how}"
        )
    versions = {p.version: p for p in of_name if p.config == config}
    found = versions.get(wanted.version or [*versions][-1])
    if found is None:
        raise errors.UsageError(
            f"tfds:{argument}: prepared is version {', '.join(versions)}, not {wanted.version}. "
            f"{how}"
        )
    check_format(argument, found)
    return found


def check_format(argument: str, found: Prepared) -> None:
    """Refuses files that only TensorFlow can read."""
    if FORMAT not in found.formats:
        raise errors.UsageError(
            f"tfds:{argument}: {found.path} is prepared as {', '.join(found.formats)}; expected "
            f"{FORMAT}, which is read without TensorFlow. Move that folder away, then: "
            f"fedjax-flat prepare tfds:{argument} --data FOLDER"
        )


def prepare(argument: str, data_dir: pathlib.Path | None) -> pathlib.Path:
    """Downloads and prepares a data set in FOLDER/tensorflow_datasets; returns its folder.

    Files that were downloaded by hand are taken from FOLDER/NAME. Every data set gets a folder for
    downloads of its own, because MNIST and Fashion-MNIST give their files the same names.
    """
    wanted = Wanted.parse(argument)
    if data_dir is None:
        raise errors.UsageError(f"no data folder was given: say --data or {DATA_VARIABLE}.")
    if importlib.util.find_spec("tensorflow") is None:
        raise errors.UsageError(
            "preparing needs TensorFlow, which is not installed here: pip install "
            f"'fedjax-flat[tfds]', or prepare tfds:{argument} on another machine and copy its "
            "folder tensorflow_datasets. What is prepared is read without TensorFlow."
        )
    root = data_dir / "tensorflow_datasets"
    for found in prepared(root, wanted.name):
        if found.config == wanted.config and found.version == (wanted.version or found.version):
            check_format(argument, found)
    import tensorflow_datasets as tfds

    known = tfds.list_builders(with_community_datasets=False)
    if wanted.name not in known:
        raise errors.UsageError(
            f"tfds:{argument}: tensorflow-datasets {tfds.__version__} has no {wanted.name!r}."
            + errors.did_you_mean(wanted.name, known)
        )
    manual = data_dir / wanted.name
    config = tfds.download.DownloadConfig(manual_dir=manual if manual.is_dir() else None)
    try:
        builder = tfds.builder(argument, data_dir=root, file_format=FORMAT)
        builder.download_and_prepare(
            download_dir=root / "downloads" / wanted.name, download_config=config
        )
    except Exception as e:  # whatever a builder and its download do
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise errors.UsageError(
            f"tfds:{argument} cannot be prepared: {reason} Files that cannot be downloaded are "
            f"taken from {manual}, under the names they have at their source."
        ) from e
    return pathlib.Path(builder.data_path)
