"""FEMNIST: handwritten characters by writer, in LEAF's or in TensorFlow Federated's files.

Both have 28x28 pixels from 0, ink, to 1, paper; they are stored as bytes, round(255 x), and enter
a network from 0 to 1 again, with no other normalisation. Classes are the digits, the capitals, the
small letters. The two differ: LEAF's preprocess.sh makes 3,550 writers of the original scans, and
TensorFlow Federated published 3,400 (671,585 train and 77,483 test images).
"""

import pathlib
import string

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.sources import clients, files, leaf, tff
from fedjax_flat.data.sources.base import SOURCES, Dataset, Examples, Source
from fedjax_flat.settings import Setting

_CLASSES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
_LAYOUTS = {"leaf": "femnist/data", "tff": "femnist/fed_emnist_train.h5"}


def femnist(data_dir, layout: str = "any", classes: int = 62) -> Dataset:
    """All 62 classes, or the 10 digits: writers who then have no train image are left out."""
    found, place = clients.choose_layout("femnist", data_dir, _LAYOUTS, layout)
    read = _read_leaf if found == "leaf" else _read_tff
    train, test = (
        {writer: _only(part, classes) for writer, part in read(place, split).items()}
        for split in ("train", "test")
    )
    return clients.by_client(
        "femnist", train, test, classes, max_value=255.0, mean=(0.0,), std=(1.0,),
        classes=_CLASSES[:classes],
    )


def _read_leaf(place: pathlib.Path, split: str) -> dict[str, Examples]:
    return {writer: _examples(place / split, writer, np.asarray(x, np.float32), y)
            for writer, x, y in leaf.read(place / split)}


def _read_tff(place: pathlib.Path, split: str) -> dict[str, Examples]:
    path = files.need("femnist", place.parent, [f"fed_emnist_{split}.h5"])
    return {writer: _examples(path, writer, pixels, labels)
            for writer, (pixels, labels) in tff.read(path, ("pixels", "label"))}


def _examples(path: pathlib.Path, writer: str, pixels: np.ndarray, labels) -> Examples:
    labels = np.asarray(labels, np.int32).reshape(-1)
    low, high = pixels.min(initial=0), pixels.max(initial=0)
    if pixels.size != 784 * len(labels) or low < 0 or high > 1:
        raise errors.UsageError(
            f"{path}: writer {writer!r} has pixels of shape {pixels.shape} from {low:g} to {high:g}"
            f" and {len(labels)} labels: expected 28x28 pixels from 0 to 1 for each label."
        )
    if labels.min(initial=0) < 0 or labels.max(initial=0) >= len(_CLASSES):
        raise errors.UsageError(
            f"{path}: writer {writer!r} has labels from {labels.min()} to {labels.max()}: expected "
            f"0 to {len(_CLASSES) - 1}."
        )
    images = np.rint(255 * pixels.reshape(-1, 28, 28, 1)).astype(np.uint8)
    return Examples(images, labels)


def _only(part: Examples, classes: int) -> Examples:
    kept = part.labels < classes
    return part if kept.all() else Examples(part.inputs[kept], part.labels[kept])


SOURCES.add("femnist", Source(
    femnist,
    about="handwritten digits and letters, clients are writers",
    size="images of 28x28x1, 62 classes: 805,263 by 3,550 writers (LEAF), or 671,585 + 77,483 by "
         "3,400 (TFF)",
    licence="NIST Special Database 19, public domain; LEAF BSD 2-Clause, TFF Apache-2.0",
    files="femnist/data/train/*.json and femnist/data/test/*.json as LEAF's preprocess.sh writes "
          "them, or femnist/fed_emnist_train.h5 and femnist/fed_emnist_test.h5 of TFF",
    here=clients.says_here(_LAYOUTS),
    settings={
        "layout": clients.layout_setting(_LAYOUTS),
        "classes": Setting(62, "10 are the digits alone", choices=(62, 10)),
    },
))
