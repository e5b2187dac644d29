"""The corrupted test images of a data set: as published, or made anew and kept.

Published are folders CIFAR-10-C/ and CIFAR-100-C/ (zenodo.org/records/2535967 and 3555552) with
NAME.npy, bytes of shape (50000, 32, 32, 3), severities 1 to 5 after each other, each with all test
images in their order, and labels.npy. Where the folder is in the data folder, NAME.npy is read from
there. Else the images are made by `corrupt` and kept in CIFAR-10-C-ours/NAME_SEVERITY.npy.
"""

import logging
import pathlib

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.corruptions.table import CORRUPTIONS, SEVERITIES, corrupt
from fedjax_flat.data.sources import Dataset, Examples, count_of, files

logger = logging.getLogger("fedjax_flat")
_FOLDERS = {"cifar10": "CIFAR-10-C", "cifar100": "CIFAR-100-C"}
_said: set[str] = set()


def folder_of(dataset: str) -> str:
    """The name of the published folder of a data set, which must be CIFAR."""
    if dataset not in _FOLDERS:
        raise errors.UsageError(
            f"corruptions of {dataset}: expected {' or '.join(_FOLDERS)}, whose corrupted test "
            "images are published."
        )
    return _FOLDERS[dataset]


def corrupted(
    dataset: Dataset,
    name: str,
    severity: int,
    *,
    data_dir: pathlib.Path | None = None,
    cache: pathlib.Path | None = None,
    limit: int = 0,
) -> Examples:
    """The test examples, or the first `limit`, under one corruption, with the labels they have.

    Made images are kept in `cache` (default: beside the published folder, in `data_dir`), unless
    only a part of them was asked for.
    """
    errors.lookup("corruption", name, CORRUPTIONS)
    if severity not in SEVERITIES:
        raise errors.UsageError(f"severity {severity}: expected 1, 2, 3, 4 or 5.")
    errors.at_least("limit", limit, 0)
    folder, total = folder_of(dataset.name), count_of(dataset.test)
    count = min(limit or total, total)
    labels = np.asarray(dataset.test.labels)[:count]
    home = None if data_dir is None else pathlib.Path(data_dir)
    if home is not None and (home / folder).is_dir():
        images = _published(home / folder, name, severity, dataset)[:count]
        return Examples(np.array(images), labels)
    if cache is None and home is not None:
        cache = home / f"{folder}-ours"
    if folder not in _said:
        _said.add(folder)
        kept = f", and kept in {cache}" if cache and count == total else ""
        logger.info("no %s in the data folder: its images are ours, with other random draws and "
                    "frost that is drawn%s.", folder, kept)
    path = cache and pathlib.Path(cache) / f"{name}_{severity}.npy"
    if path and path.exists():
        images = files.memory_mapped(path, dataset.test.inputs.shape, np.uint8)
        return Examples(np.array(images[:count]), labels)
    images = corrupt(np.asarray(dataset.test.inputs)[:count], name, severity)
    if path and count == total:
        with files.written_whole(path) as partial, open(partial, "wb") as file:
            np.save(file, images)
    return Examples(images, labels)


def _published(folder: pathlib.Path, name: str, severity: int, dataset: Dataset) -> np.ndarray:
    """One severity of a published array, not yet read."""
    shape, given = dataset.test.inputs.shape, np.asarray(dataset.test.labels)
    arrays = {}
    for file, expected in ((name, (5 * shape[0], *shape[1:])), ("labels", (5 * shape[0],))):
        path = folder / f"{file}.npy"
        if not path.is_file():
            raise errors.UsageError(
                f"{folder} lacks {path.name}: expected NAME.npy of all 19 corruptions and "
                "labels.npy. Extract the archive again, or remove the folder to have them made."
            )
        try:
            arrays[file] = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError) as e:
            raise errors.UsageError(
                f"{path} is no whole .npy file ({e}). Extract the archive again."
            ) from e
        found = arrays[file]
        if found.shape != expected or found.dtype.kind not in "iu" or (
            file == name and found.dtype != np.uint8
        ):
            raise errors.UsageError(
                f"{path} holds {found.dtype} of shape {found.shape}: expected whole numbers of "
                f"shape {expected}, five severities of {shape[0]:,} images."
            )
    part = slice((severity - 1) * shape[0], severity * shape[0])
    fine = dataset.num_classes == {"cifar10": 10, "cifar100": 100}[dataset.name]
    if fine and (arrays["labels"][part] != given).any():
        raise errors.UsageError(
            f"{folder / 'labels.npy'} differs from the test labels of {dataset.name}: these are "
            "corruptions of other images, or in another order."
        )
    return arrays[name][part]
