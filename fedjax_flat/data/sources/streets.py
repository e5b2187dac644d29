"""Streets seen from cars: pictures with a label for every pixel, and the place each is from.

A domain is where a picture was taken, and a natural client: a drive, a city, a town in some
weather. Test pictures of domains that are trained on are split `seen`, those of others `unseen`,
and every domain that is tested is a split of its own name.

What every data set of this family does alike: labels become classes by a table (what it lacks is an
error that names file and value), pictures are resized by the triangle filter and labels by the
nearest pixel, values are normalised by (x / 255 - 0.5) / 0.5, as FedDrive has it.
"""

import io
import pathlib
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.sources import decode, files
from fedjax_flat.data.sources.base import Dataset, Examples, numbered
from fedjax_flat.settings import Setting

IGNORED = 255
File = Any  # pathlib.Path, or zipfile.Path: a file in a zip


class Scene(NamedTuple):
    """A picture, the labels of its pixels, where it is from, and whose it is ('': the domain's).

    Without labels (None) every pixel is `IGNORED`.
    """

    image: File
    labels: File | None
    domain: str
    client: str = ""


class Classes(NamedTuple):
    """Names and colours of the classes; what a value in a file of labels means (or `IGNORED`)."""

    names: tuple[str, ...]
    colours: tuple[tuple[int, int, int], ...]
    of_value: Mapping[int, int]


def dataset(
    name: str, train: Sequence[Scene], test: Sequence[Scene], classes: Classes, *,
    root: pathlib.Path | None, size: tuple[int, ...] = (),
) -> Dataset:
    """Decoded pictures and labels; in the cache of `root` if there is one, else in memory.

    `size` is (height, width), or () for the size of the first picture.
    """
    if not train or not test:
        raise errors.UsageError(
            f"{name}: {len(train)} train and {len(test)} test pictures: expected some of both."
        )
    size = size or _size_of(train[0].image)
    splits = [_examples(name, scenes, classes, size, root) for scenes in (train, test)]
    names, owners = numbered([scene.client or scene.domain for scene in train])
    tested = np.array([scene.domain for scene in test])
    seen = np.isin(tested, [scene.domain for scene in train])
    test_owners = _owners_of(tested, train, owners)
    parts = {"seen": np.flatnonzero(seen), "unseen": np.flatnonzero(~seen)}
    parts |= {str(domain): np.flatnonzero(tested == domain) for domain in np.unique(tested)}
    half = (0.5, 0.5, 0.5)
    return Dataset(
        name, splits[0], splits[1], len(classes.names), 255.0, half, half, "segmentation", owners,
        test_owners if (test_owners >= 0).any() else None, names, classes.names,
        parts={part: where for part, where in parts.items() if len(where)},
        colours=classes.colours,
    )


def _owners_of(tested: np.ndarray, train: Sequence[Scene], owners: np.ndarray) -> np.ndarray:
    """The first client that sees a test picture's domain and no other; -1 if none does."""
    domains = np.array([scene.domain for scene in train])
    found = {}
    for client in np.unique(owners)[::-1]:
        own = np.unique(domains[owners == client])
        if len(own) == 1:
            found[str(own[0])] = int(client)
    return np.array([found.get(str(domain), -1) for domain in tested], np.int32)


def opened(path: pathlib.Path) -> File:
    """A folder, or what is in a zip."""
    if path.is_dir():
        return path
    try:
        return zipfile.Path(path)
    except zipfile.BadZipFile as e:
        raise errors.UsageError(
            f"{path} is no whole zip ({e}): put it there again, or a folder."
        ) from e


def _examples(name, scenes, classes, size, root) -> Examples:
    """Pictures and labels of the scenes."""
    named = [f for scene in scenes for f in (scene.image, scene.labels) if f is not None]
    missing = [f for f in named if not f.is_file()]
    if missing:
        raise errors.UsageError(
            f"{name}: no {missing[0]} ({len(missing)} such files). Put them there, or take them "
            "out of the list that names them."
        )
    table = np.full(256, -1, np.int16)
    for value, label in classes.of_value.items():
        table[value] = label
    images = _decoded(
        name, scenes, [s.image for s in scenes], lambda s: _picture(s.image, size), (*size, 3), root
    )
    labels = _decoded(
        name, scenes, [s.labels or s.image for s in scenes], lambda s: _labels(s, table, size),
        size, root, [s.labels is None for s in scenes], sorted(classes.of_value.items()),
    )
    return Examples(images, labels)


def _decoded(name, scenes, sources, one, shape, root, *how) -> np.ndarray:
    """one(scene) for each, from the cache if it is there; an error names one of `sources`."""
    whole, fetch = (len(scenes), *shape), lambda which: [scenes[i] for i in which]
    path = None
    if root is not None:
        mark = files.fingerprint(root, sources, decode.VERSION, shape, *how)
        path = files.cache_folder(root) / f"{mark}.npy"
        if path.is_file():
            return files.memory_mapped(path, whole, np.uint8)
    try:
        return decode.filled(name, path, whole, fetch, one)
    except decode.Unreadable as e:
        more = f" ({len(e.which)} such files)" if len(e.which) > 1 else ""
        raise errors.UsageError(f"{name}: {sources[e.which[0]]}: {e.why}{more}.") from e


def _picture(file: File, size) -> np.ndarray:
    from PIL import Image

    with Image.open(io.BytesIO(file.read_bytes())) as opened:
        return np.asarray(_resized(opened.convert("RGB"), size, Image.Resampling.BILINEAR))


def _labels(scene: Scene, table: np.ndarray, size) -> np.ndarray:
    """Classes of the pixels; a ValueError says what is wrong with the file."""
    from PIL import Image

    if scene.labels is None:
        return np.full(size, IGNORED, np.uint8)
    with Image.open(io.BytesIO(scene.labels.read_bytes())) as opened:
        values = np.asarray(opened)
    if values.ndim != 2 or values.dtype != np.uint8:
        raise ValueError(f"{values.dtype} of shape {values.shape}: expected a byte per pixel")
    expected = _size_of(scene.image)
    if values.shape != expected:
        raise ValueError(
            f"labels of {values.shape[0]}x{values.shape[1]} pixels for {scene.image.name}, a "
            f"picture of {expected[0]}x{expected[1]}: expected the same size"
        )
    found = table[values]
    if (found < 0).any():
        known = np.flatnonzero(table >= 0).tolist()
        raise ValueError(
            f"label {values[found < 0].min()} is no class and is not ignored: expected "
            f"{', '.join(map(str, known))}"
        )
    return np.asarray(
        _resized(Image.fromarray(found.astype(np.uint8)), size, Image.Resampling.NEAREST)
    )


def _size_of(file: File) -> tuple[int, int]:
    """(height, width) of a picture."""
    from PIL import Image

    with Image.open(io.BytesIO(file.read_bytes())) as opened:
        return opened.height, opened.width


def _resized(picture, size, how):
    return picture if picture.size == size[::-1] else picture.resize(size[::-1], how)



def size_setting(height: int, width: int) -> Setting:
    """Of a source whose pictures are resized."""
    return Setting((height, width), "height and width of the stored pictures")
