"""Omniglot's two small background sets by writer (Lake et al. 2015): 242 characters, 8 alphabets.

Twenty people drew each alphabet, every character once, so a natural client is a pair (alphabet,
drawer), 160 in all. A class occurs once per writer: whole writers are held out, drawers 4, 9, 14
and 19 (from 0) of each alphabet, so that every class has 16 train and 4 test drawings. Of the 128
writers that are left none has a test drawing, and all test drawings are nobody's.

Drawings are 105x105 with ink 255 on 0. At `side` 28 a pixel is the mean of the 3.75 x 3.75 pixels
it covers, those at its edge by the share it covers.
"""

import pathlib
import zipfile
import zlib

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.sources import files
from fedjax_flat.data.sources.base import SOURCES, Dataset, Examples, Source, numbered
from fedjax_flat.settings import Setting

_FILE = "omniglot/omniglot-small.npz"
_KEYS = ("ink", "alphabet", "character", "drawer", "alphabet_names", "character_names")
_SIDE = 105


def omniglot(data_dir, side: int = 28) -> Dataset:
    """Drawings of `side` x `side` bytes, normalised by the train drawings' mean and deviation."""
    found = _read(files.need("omniglot", data_dir, [_FILE]))
    ink = np.unpackbits(found["ink"], axis=-1, count=_SIDE)
    images = (255 * ink if side == _SIDE else shrink(ink, side))[..., None]
    labels = found["character"].astype(np.int32)
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
