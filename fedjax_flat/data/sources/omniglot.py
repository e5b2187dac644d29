"""Omniglot's two small background sets by writer (Lake et al. 2015): 242 characters, 8 alphabets.

Twenty people drew each alphabet, every character once, so a natural client is a pair (alphabet,
drawer), 160 in all. A class occurs once per writer: whole writers are held out, drawers 4, 9, 14
and 19 (from 0) of each alphabet, so that every class has 16 train and 4 test drawings. Of the 128
writers that are left none has a test drawing, and all test drawings are nobody's.

`omniglot_retrieval` is for finding drawings of the same character. Some alphabets are only tested
on: drawings by drawers 0 to 9 are the database, those by 10 to 19 the queries. Of the others every
drawing is trained on. Labels are the characters; an alphabet is a city, and a client of it a few
drawers, because one drew every character once and would have nothing to compare it with.

Drawings are 105x105 with ink 255 on 0. At `side` 28 a pixel is the mean of the 3.75 x 3.75 pixels
it covers, those at its edge by the share it covers.
"""

import pathlib
import zipfile
import zlib

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.sources import files, places
from fedjax_flat.data.sources.base import SOURCES, Dataset, Examples, Source, numbered
from fedjax_flat.settings import Setting

_FILE = "omniglot/omniglot-small.npz"
_KEYS = ("ink", "alphabet", "character", "drawer", "alphabet_names", "character_names")
_SIDE = 105
_DATABASE = 10  # drawers whose drawings are searched, of retrieval


def omniglot(data_dir, side: int = 28) -> Dataset:
    """Drawings of `side` x `side` bytes, normalised by the train drawings' mean and deviation."""
    found = _read(files.need("omniglot", data_dir, [_FILE]))
    images, labels = _drawings(found, side), found["character"].astype(np.int32)
    writers = np.array([f"{found['alphabet_names'][a]} {d:02d}"
                        for a, d in zip(found["alphabet"], found["drawer"], strict=True)])
    test = found["drawer"] % 5 == 4
    names, owners = numbered(writers[~test])
    train = Examples(images[~test], labels[~test])
    pixels = train.inputs / 255
    return Dataset(
        "omniglot", train, Examples(images[test], labels[test]),
        len(found["character_names"]), 255.0, (float(pixels.mean()),), (float(pixels.std()),),
        owners=owners, test_owners=np.full(test.sum(), -1, np.int32), clients=names,
        classes=tuple(map(str, found["character_names"])),
    )


def omniglot_retrieval(
    data_dir, side: int = 28, unseen: tuple[str, ...] = ("Greek", "Korean"), drawers: int = 5
) -> Dataset:
    """Drawings of characters; clients are `drawers` people of one alphabet each."""
    found = _read(files.need("omniglot_retrieval", data_dir, [_FILE]))
    known = [str(name) for name in found["alphabet_names"]]
    for name in unseen:
        errors.lookup("unseen alphabet of omniglot_retrieval", name, dict.fromkeys(known))
    if not unseen or set(unseen) == set(known):
        raise errors.UsageError(
            f"unseen = {unseen!r}: expected some of the alphabets {', '.join(known)}, and some "
            "others to train on."
        )
    images, labels = _drawings(found, side), found["character"].astype(np.int32)
    alphabet, drawer = np.array(known)[found["alphabet"]], found["drawer"]
    test = np.isin(alphabet, unseen)
    names, owners = numbered([
        f"{a}/{d - d % drawers:02d}" for a, d in zip(alphabet[~test], drawer[~test], strict=True)
    ])
    pixels = images[~test] / 255
    dataset = Dataset(
        "omniglot_retrieval", Examples(images[~test], labels[~test]),
        Examples(images[test], labels[test]), len(found["character_names"]), 255.0,
        (float(pixels.mean()),), (float(pixels.std()),), "retrieval", owners, None, names,
        tuple(map(str, found["character_names"])),
        parts=places.parts_of(drawer[test] >= _DATABASE),
    )
    places.check_places(dataset)
    return dataset


def _drawings(found: dict[str, np.ndarray], side: int) -> np.ndarray:
    ink = np.unpackbits(found["ink"], axis=-1, count=_SIDE)
    return (255 * ink if side == _SIDE else shrink(ink, side))[..., None]


def shrink(ink: np.ndarray, side: int) -> np.ndarray:
    """Square drawings of 0 and 1 as bytes of side x side, by area."""
    size = ink.shape[-1]
    edges = np.linspace(0, size, side + 1)
    # How much of pixel j lies within the new pixel i, along one axis.
    low = np.maximum(edges[:-1, None], np.arange(size)[None])
    high = np.minimum(edges[1:, None], np.arange(1, size + 1)[None])
    share = np.maximum(high - low, 0) * side / size
    mean = np.matmul(np.matmul(share, ink.astype(np.float64)), share.T)
    return np.rint(255 * mean).astype(np.uint8)


def _read(path: pathlib.Path) -> dict[str, np.ndarray]:
    try:
        with open(path, "rb") as f, np.load(f, allow_pickle=False) as z:
            found = {key: z[key] for key in _KEYS if key in z}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as e:
        raise errors.UsageError(
            f"{path}: {path.stat().st_size:,} bytes that are no whole .npz file ({e}). It is "
            "truncated or altered: put it there again."
        ) from e
    missing = [key for key in _KEYS if key not in found]
    if missing:
        raise errors.UsageError(f"{path} lacks {', '.join(missing)}: expected {', '.join(_KEYS)}.")
    count, packed = len(found["character"]), -(-_SIDE // 8)
    if found["ink"].shape != (count, _SIDE, packed):
        raise errors.UsageError(
            f"{path}: ink of shape {found['ink'].shape} for {count} characters: expected ({count}, "
            f"{_SIDE}, {packed}), rows of {_SIDE} bits."
        )
    return found


SOURCES.add("omniglot", Source(
    omniglot,
    about="drawn characters of 8 alphabets, clients are writers",
    size="3,872 + 968 images of 28x28x1 (or 105x105x1), 242 classes, 128 + 32 writers, 0.6 MB",
    licence="MIT",
    files=f"{_FILE} with {', '.join(_KEYS)}, ink as packed bits",
    here=files.is_here(_FILE),
    settings={"side": Setting(28, "pixels", choices=(28, _SIDE))},
))
SOURCES.add("omniglot_retrieval", Source(
    omniglot_retrieval,
    about="drawn characters to be found again, in alphabets that nobody trained on",
    size="3,560 + 1,280 images (by default) of 28x28x1 (or 105x105x1), 242 characters",
    licence="MIT",
    files=f"{_FILE}, as for omniglot",
    here=files.is_here(_FILE),
    settings={
        "side": Setting(28, "pixels", choices=(28, _SIDE)),
        "unseen": Setting(("Greek", "Korean"), "alphabets that are only tested on"),
        "drawers": Setting(5, "people of each client", at_least=1, at_most=20),
    },
))
