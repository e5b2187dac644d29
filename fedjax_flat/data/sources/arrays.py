"""Own arrays in files: `npz:FILE`, or `npy:FOLDER` for data larger than memory.

Names, as keys of the .npz or as files NAME.npy of the folder:

    inputs, labels             examples first; whole-number labels are classes from 0
    test_inputs, test_labels   without them, the train examples are tested on
    owners, test_owners        the client of each example, by number or name; optional

Keras' x_train, y_train, x_test, y_test are taken for the first four. A number of classes, a
`max_value` and the channels' `mean` and `std` may stand beside them: as keys of the .npz, or in
the folder's info.json, {"num_classes": 10, "mean": [0.5], "std": [0.25], "max_value": 255}.
Arrays of a folder are memory-mapped and never copied. Nothing is unpickled.
"""

import json
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedjax_flat import disk, errors
from fedjax_flat.data.sources import files, listing
from fedjax_flat.data.sources.base import SOURCES, Dataset, Source, from_arrays

_KERAS = {"x_train": "inputs", "y_train": "labels", "x_test": "test_inputs",
          "y_test": "test_labels"}
_ARRAYS = ("inputs", "labels", "test_inputs", "test_labels", "owners", "test_owners")
_NUMBERS = ("num_classes", "max_value", "mean", "std")

log = logging.getLogger(__name__)


def npz(data_dir, argument: str) -> Dataset:
    """Arrays of one .npz file."""
    name = f"npz:{argument}"
    path = files.located(name, data_dir, argument, "FILE.npz with inputs and labels")
    try:
        found = disk.read_npz(path)
    except (OSError, ValueError) as e:
        raise errors.UsageError(
            f"{name}: {path} cannot be read as an .npz of plain arrays ({e}). Write it with "
            "numpy.savez(FILE, inputs=..., labels=...)."
        ) from e
    return _dataset(name, str(path), found)


def npy(data_dir, argument: str) -> Dataset:
    """Memory-mapped .npy files of one folder."""
    name = f"npy:{argument}"
    folder = files.located(name, data_dir, argument, "FOLDER/inputs.npy and labels.npy")
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.npy")):
        try:
            found[path.stem] = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as e:
            raise errors.UsageError(
                f"{name}: {path} cannot be memory-mapped ({e}). Write it with numpy.save, as "
                "numbers."
            ) from e
    return _dataset(name, str(folder), found | _info(folder / "info.json"))


def _info(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
        unknown = [key for key in content if key not in _NUMBERS]
        numbers = {key: np.asarray(content[key], np.float64) for key in content}
    except (TypeError, ValueError) as e:
        raise errors.UsageError(f"{path}: not an object of numbers in JSON ({e}).") from e
    if unknown:
        raise errors.UsageError(
            f"{path} has {', '.join(unknown)}: expected only {', '.join(_NUMBERS)}."
            + errors.did_you_mean(unknown[0], _NUMBERS)
        )
    return numbers


def _dataset(name: str, where: str, found: Mapping[str, Any]) -> Dataset:
    arrays = {_KERAS.get(key, key): value for key, value in found.items()}
    missing = [key for key in ("inputs", "labels") if key not in arrays]
    missing += [b for a, b in (("test_inputs", "test_labels"), ("test_labels", "test_inputs"),
                               ("test_owners", "owners")) if a in arrays and b not in arrays]
    if missing:
        raise errors.UsageError(
            f"{name}: {where} has {', '.join(found) or 'no arrays'}, but no {missing[0]}. Expected "
            f"{', '.join(_ARRAYS[:4])} (the last two if there is a test set), and owners if there "
            "are natural clients."
        )
    ignored = [key for key in arrays if key not in (*_ARRAYS, *_NUMBERS)]
    if ignored:
        log.info("%s: %s not used; known are %s.", name, ", ".join(ignored), ", ".join(_ARRAYS))
    splits = [(arrays[p + "inputs"], _labels(arrays[p + "labels"]))
              for p in ("", "test_") if p + "inputs" in arrays]
    numbers = {key: arrays[key] for key in _NUMBERS if key in arrays}
    for key in numbers:
        value, several = np.asarray(numbers[key]), key in ("mean", "std")
        if value.dtype.kind not in "fiu" or value.ndim > several:
            raise errors.UsageError(
                f"{name}: {key} is {value.dtype} of shape {value.shape}; expected "
                + ("one number per channel." if several else "a number.")
            )
        if several:
            numbers[key] = tuple(np.atleast_1d(value).tolist())
        else:
            numbers[key] = int(value) if key == "num_classes" else float(value)
    dataset = from_arrays(*splits[0], test=splits[1] if len(splits) > 1 else None, name=name,
                          **numbers)
    if "owners" not in arrays:
        return dataset
    for owners, labels in (("owners", dataset.train.labels), ("test_owners", dataset.test.labels)):
        if owners in arrays and np.shape(arrays[owners]) != (len(labels),):
            raise errors.UsageError(
                f"{name}: {owners} of shape {np.shape(arrays[owners])}, but there are "
                f"{len(labels)} examples: expected one for each."
            )
    return listing.with_clients(dataset, arrays["owners"], arrays.get("test_owners"))


def _labels(labels: np.ndarray) -> np.ndarray:
    """Keras keeps classes as a column."""
    column = labels.ndim == 2 and labels.shape[1] == 1 and labels.dtype.kind in "iu"
    return labels[:, 0] if column else labels


SOURCES.add("npz", Source(
    npz,
    about="own arrays in one file",
    size="any that fits into memory",
    licence="yours",
    files="FILE.npz with inputs, labels, test_inputs, test_labels, owners",
    here=lambda folder: folder is not None and any(folder.glob("*.npz")),
    argument="FILE",
))
SOURCES.add("npy", Source(
    npy,
    about="own arrays, memory-mapped",
    size="any, also larger than memory",
    licence="yours",
    files="FOLDER/inputs.npy, labels.npy, test_inputs.npy, test_labels.npy, owners.npy, info.json",
    here=lambda folder: folder is not None and any(folder.glob("*/inputs.npy")),
    argument="FOLDER",
))
