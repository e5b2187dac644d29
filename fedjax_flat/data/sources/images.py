"""Own pictures: a folder with a CSV of file, label and client, or with a sub-folder per class.

Layouts of `images:FOLDER`, the first that is there:

1. FOLDER/train.csv, and FOLDER/test.csv if there is one;
2. the one CSV in FOLDER, with a column `split` (train or test) if there are test images;
3. FOLDER/train/CLASS/..., and FOLDER/test/CLASS/...;
4. FOLDER/CLASS/...

A CSV has the columns `file` (relative to FOLDER) and `label`, and `client` if there are natural
clients; a test image without one is nobody's.
"""

import pathlib

from fedjax_flat import errors
from fedjax_flat.data.sources import decode, files, listing
from fedjax_flat.data.sources.base import SOURCES, Dataset, Source
from fedjax_flat.data.sources.listing import Row

_ENDINGS = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}


def images(data_dir, argument: str, side: int = 224, skip_unreadable: bool = False) -> Dataset:
    """The pictures of a folder."""
    name = f"images:{argument}"
    folder = files.located(name, data_dir, argument, "FOLDER/train.csv or FOLDER/CLASS/...")
    if not folder.is_dir():
        raise errors.UsageError(f"{name}: {folder} is a file; expected a folder of images.")
    train, test = _listed(name, folder)
    return listing.dataset(name, train, test, decode.Form(side), root=folder,
                           skip_unreadable=skip_unreadable)


def _listed(name: str, folder: pathlib.Path) -> tuple[list[Row], list[Row]]:
    tables = sorted(folder.glob("*.csv"))
    names = [t.name for t in tables]
    if "train.csv" in names:
        train, test = _rows(folder / "train.csv")
        if "test.csv" in names:
            test += [row for part in _rows(folder / "test.csv", "test") for row in part]
        return train, test
    if len(tables) > 1:
        raise errors.UsageError(
            f"{name}: {folder} has {', '.join(names)}: expected train.csv (and test.csv), or one "
            "CSV."
        )
    if tables:
        return _rows(tables[0])
    parts = [_classes(folder / part) for part in ("train", "test")]
    if parts[0]:
        return parts[0], parts[1]
    found = _classes(folder)
    if not found:
        raise errors.UsageError(
            f"{name}: {folder} has no CSV and no sub-folders with images. Put a train.csv there "
            "with the columns file, label, client, or one sub-folder for each class."
        )
    return found, []


def _rows(path: pathlib.Path, default: str = "train") -> tuple[list[Row], list[Row]]:
    """(train, test) of a CSV; without a split, all rows are `default`."""
    split: dict[str, list[Row]] = {"train": [], "test": []}
    for where, cells in listing.read_csv(path, ("file", "label")):
        if not cells["file"]:
            raise errors.UsageError(f"{where}: no file.")
        kind = cells.get("split", default).lower()
        if kind not in split:
            raise errors.UsageError(f"{where}: split {kind!r}: expected train or test.")
        split[kind].append(
            Row(where, path.parent / cells["file"], cells["label"], cells.get("client", ""))
        )
    return split["train"], split["test"]


def _classes(folder: pathlib.Path) -> list[Row]:
    """Every image below a sub-folder, which is its class."""
    if not folder.is_dir():
        return []
    kinds = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    return [
        Row(str(kind), path, kind.name)
        for kind in kinds
        for path in sorted(kind.rglob("*"))
        if path.suffix.lower() in _ENDINGS
    ]


def _is_here(folder: pathlib.Path | None) -> bool:
    return folder is not None and any(folder.glob("*/*.csv"))


SOURCES.add("images", Source(
    images,
    about="own pictures, with labels and clients",
    size="any",
    licence="yours",
    files="FOLDER/train.csv (file, label, client) and test.csv, or FOLDER/train/CLASS/...; "
          "see docs/data.md",
    here=_is_here,
    settings=listing.SETTINGS,
    argument="FOLDER",
))
