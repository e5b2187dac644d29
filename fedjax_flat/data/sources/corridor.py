"""Corridor: two walks along one corridor, for place recognition (Milford 2013; VPR-Bench's files).

The reference walk is the database, the other one the queries, 111 pictures of 160x120 each. Right
answers of query q are the references q - 2 to q + 2, as far as they exist: so the published table
says, and the files are checked for it. A position is therefore made up: 10 m for each picture,
which makes `task.radius` = 25 the published ground truth. That is too little to learn from, and
meant for tests of what was learned elsewhere; what is trained on is the reference walk, cut into
`clients` stretches.
"""

import csv
import io

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.sources import decode, files, places, streets
from fedjax_flat.data.sources.base import (
    SOURCES,
    Dataset,
    Examples,
    Source,
    channel_statistics,
    numbered,
)
from fedjax_flat.settings import Setting

METRES, REACH = 10.0, 2  # from picture to picture; right answers to each side, in pictures
_PLACES = ("corridor/ground_truth.csv", "corridor/corridor.zip")
_WALKS = ("ref", "query")


def corridor(data_dir, clients: int = 4) -> Dataset:
    """The reference walk to learn from; both walks to test on."""
    found = files.need("corridor", data_dir, _PLACES)
    folder = streets.opened(found) / "corridor" if found.suffix == ".zip" else found.parent
    truth = _truth(folder)
    walks = {walk: _walk(folder, walk, len(truth)) for walk in _WALKS}
    references, tested = walks["ref"], np.concatenate(list(walks.values()))
    along = np.stack([METRES * np.arange(len(truth)), np.zeros(len(truth))], 1)
    positions = along.astype(np.float32)
    names, owners = numbered([f"corridor/{k * clients // len(truth):03d}"
                              for k in range(len(truth))])
    mean, std = channel_statistics("corridor", references)
    query = np.repeat([False, True], len(truth))
    dataset = Dataset(
        "corridor", Examples(references, positions),
        Examples(tested, np.concatenate([positions, positions])), 0, 255.0, mean, std,
        "retrieval", owners, None, names, parts=places.parts_of(query),
    )
    places.check_places(dataset)
    return dataset


def _truth(folder) -> list[list[int]]:
    """The right references of every query; an error where they are not those around it."""
    path = folder / "ground_truth.csv"
    if not path.is_file():
        raise errors.UsageError(f"corridor: no {path}: expected it beside query/ and ref/.")
    rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))
    truth = []
    for q, row in enumerate(rows):
        expected = list(range(max(q - REACH, 0), min(q + REACH + 1, len(rows))))
        given = (row.get("query"), (row.get("references") or "").split())
        if given != (str(q), list(map(str, expected))):
            raise errors.UsageError(
                f"{path}, row {q + 2}: {', '.join(filter(None, row.values())) or 'empty'}: "
                f"expected {q},{' '.join(map(str, expected))}."
            )
        truth.append(expected)
    if not truth:
        raise errors.UsageError(f"{path} has no queries: expected lines of query,references.")
    return truth


def _walk(folder, walk: str, count: int) -> np.ndarray:
    from PIL import UnidentifiedImageError

    pictures = []
    for i in range(count):
        path = folder / walk / f"{i:07d}.jpg"
        if not path.is_file():
            raise errors.UsageError(f"corridor: no {path}: expected {count} pictures in {walk}/.")
        try:
            pictures.append(decode.picture(path.read_bytes(), decode.Form()))
        except UnidentifiedImageError as e:
            raise errors.UsageError(f"corridor: {path} is no picture ({e}).") from e
    shapes = {p.shape for p in pictures}
    if len(shapes) > 1:
        raise errors.UsageError(
            f"corridor: pictures of {walk}/ have {len(shapes)} sizes: expected one."
        )
    return np.stack(pictures)


SOURCES.add("corridor", Source(
    corridor,
    about="two walks along a corridor, for place recognition: 111 queries, 111 references "
          "(Milford 2013)",
    size="111 + 222 images of 120x160x3",
    licence="MIT as VPR-Bench gives it",
    files="corridor/ground_truth.csv, corridor/{query,ref}/NNNNNNN.jpg, or corridor/corridor.zip "
          "with them",
    here=files.is_here(*_PLACES),
    settings={"clients": Setting(4, "stretches of the reference walk", at_least=1, at_most=111)},
))
