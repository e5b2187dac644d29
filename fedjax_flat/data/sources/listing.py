"""Lists of pictures: which file, which label, whose. What is wrong is named by its row."""

import csv
import dataclasses
import io
import logging
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.sources import decode
from fedjax_flat.data.sources.base import Dataset, Examples, channel_statistics, numbered
from fedjax_flat.settings import Setting

SETTINGS = {
    "side": Setting(224, "of the stored square, in pixels", at_least=1),
    "skip_unreadable": Setting(False, "go on without images that are missing or cannot be read"),
}

log = logging.getLogger(__name__)


class Row(NamedTuple):
    """One picture; `where` it is listed, for people. No client: nobody's."""

    where: str
    file: pathlib.Path
    label: str
    client: str = ""


class _Listed(Protocol):
    """What has the first two of a row's fields."""

    @property
    def where(self) -> str: ...

    @property
    def file(self) -> pathlib.Path: ...


L = TypeVar("L", bound=_Listed)


def read_csv(path: pathlib.Path, columns: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    """(where, cells by column in lower case) of each row; an error if a column is missing.

    The delimiter is the one of , ; | and tab that the header has most of.
    """
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as e:
        raise errors.UsageError(f"{path}: not a text in UTF-8 ({e.reason}).") from e
    delimiter = max(",;\t|", key=text.partition("\n")[0].count)
    reader = csv.reader(io.StringIO(text), delimiter=delimiter, skipinitialspace=True)
    header = [h.strip().lower() for h in next(reader, [])]
    missing = [c for c in columns if c not in header]
    if missing:
        raise errors.UsageError(
            f"{path} has the columns {', '.join(header) or '(none)'}: expected "
            f"{', '.join(columns)} in its first line." + errors.did_you_mean(missing[0], header)
        )
    rows = []
    for cells in reader:
        where = f"{path}, row {reader.line_num}"
        if len(cells) > len(header):
            raise errors.UsageError(
                f"{where} has {len(cells)} cells, the header {len(header)}: put cells that hold "
                f"{delimiter!r} in quotes."
            )
        if any(c.strip() for c in cells):
            padded = [c.strip() for c in cells] + [""] * (len(header) - len(cells))
            rows.append((where, dict(zip(header, padded, strict=True))))
    return rows


def refuse(rows: Iterable[Row], wrong: Callable[[Row], bool], text: Callable[[Row], str]) -> None:
    """Raises an error for the first row that is wrong, and says how many are."""
    found = [row for row in rows if wrong(row)]
    if found:
        raise errors.UsageError(f"{found[0].where}: {text(found[0])} ({len(found)} such rows).")


def dataset(
    name: str, train: Sequence[Row], test: Sequence[Row], form: decode.Form, *,
    root: pathlib.Path, skip_unreadable: bool, num_classes: int = 0,
    normal: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
) -> Dataset:
    """Decodes the pictures, into the cache of `root`. Without test rows, train is tested on.

    Labels are 0 to num_classes - 1; without that number, whatever stands there. `normal` is the
    channels' mean and deviation, if not their own.
    """
    train, test = (present(name, rows, skip_unreadable) for rows in (train, test))
    if not train:
        raise errors.UsageError(f"{name}: no train images in {root}.")
    check_clients(train)
    classes, to_class = _classes([*train, *test], num_classes)
    splits, kept = [], []
    for rows in (train, test) if test else (train,):
        images, positions = decode.pictures(
            name, [r.file for r in rows], form, root=root, skip_unreadable=skip_unreadable
        )
        kept.append([rows[i] for i in positions])
        labels = np.array([to_class(r.label) for r in kept[-1]], np.int32)
        splits.append(Examples(images, labels))
    if not test:
        log.info("%s: no test images; the train images are tested on.", name)
    mean, std = normal or channel_statistics(name, splits[0].inputs)
    found = Dataset(name, splits[0], splits[-1], num_classes or len(classes), 255.0, mean, std,
                    classes=() if num_classes else classes)
    clients = [[row.client for row in rows] for rows in (kept[0], kept[-1])]
    return with_clients(found, *clients) if any(clients[0]) else found


def with_clients(found: Dataset, train: Any, test: Any = None) -> Dataset:
    """With the natural client of every example, by any values; '' and -1 are nobody, in test."""
    names, owners = numbered(train)
    number = {n: i for i, n in enumerate(names)}
    tested = [] if test is None else [str(c) for c in np.asarray(test).tolist()]
    test_owners = np.array([number.get(c, -1) for c in tested], np.int32)
    strange = [c for c in tested if c not in ("", "-1") and c not in number]
    if strange:
        log.info("%s: %d clients have test examples only; they take no part, and their %d test "
                 "examples are nobody's.", found.name, len(set(strange)), len(strange))
    return dataclasses.replace(
        found, owners=owners, clients=names,
        test_owners=test_owners if any(c not in ("", "-1") for c in tested) else None,
    )


def check_clients(train: Sequence[Row]) -> None:
    """Refuses train rows of which only some have a client."""
    if any(r.client for r in train):
        refuse(train, lambda r: not r.client, lambda r: f"no client for {r.file.name}: expected "
               "one for every train image")


def present(name: str, rows: Sequence[L], skip: bool) -> list[L]:
    """The rows whose file is there."""
    there = [row.file.is_file() for row in rows]
    if all(there):
        return list(rows)
    absent = [row for row, found in zip(rows, there, strict=True) if not found]
    text = f"{absent[0].where}: no image {absent[0].file} ({len(absent)} such rows)."
    if not skip:
        raise errors.UsageError(
            f"{text} Put them there, or leave them out with --config.data.skip_unreadable=True."
        )
    log.warning("%s: %s Left out.", name, text)
    return [row for row, found in zip(rows, there, strict=True) if found]


def _classes(
    rows: Sequence[Row], num_classes: int
) -> tuple[tuple[str, ...], Callable[[str], int]]:
    """(names of the classes, label -> class): whole numbers are classes, else sorted names."""
    refuse(rows, lambda r: not r.label, lambda r: f"no label for {r.file.name}")
    if not num_classes and not all(r.label.removeprefix("-").isdecimal() for r in rows):
        names = sorted({r.label for r in rows})
        number = {n: i for i, n in enumerate(names)}
        return tuple(names), number.__getitem__
    last = num_classes - 1
    expected = f"0 to {last}" if num_classes else "0 or more"
    refuse(
        rows,
        lambda r: not r.label.isdecimal() or (num_classes > 0 and int(r.label) > last),
        lambda r: f"label {r.label!r} of {r.file.name} is no class: expected {expected}",
    )
    most = max(int(r.label) for r in rows)
    return tuple(str(c) for c in range(most + 1)), int
