"""Any data set of tensorflow-datasets that is prepared as array_record, without TensorFlow.

One feature is the input, images or numbers, one the label; what the data set calls its supervised
keys unless settings name others. Images are decoded into memory, or above 256 MB into a
memory-mapped cache. tensorflow-datasets shuffles when it prepares: the order is not that of the
original files.
"""

import dataclasses
import logging
import math
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.sources import decode, files, listing, tfds_folder
from fedjax_flat.data.sources.base import SOURCES, Dataset, Source, from_arrays
from fedjax_flat.settings import Setting

IN_MEMORY = 2**28  # bytes of decoded images

log = logging.getLogger(__name__)


class _Columns(NamedTuple):
    """The features that are read; no owner is ''."""

    input: str
    label: str
    owner: str


def tfds(
    data_dir, argument: str, input: str = "", label: str = "", owner: str = "", side: int = 0
) -> Dataset:
    """A prepared data set of tensorflow-datasets."""
    import tensorflow_datasets

    name, folder = f"tfds:{argument}", tfds_folder.find(argument, data_dir).path
    with tfds_folder.damage_named(argument, folder):
        builder = tensorflow_datasets.builder_from_directory(
            folder, file_format=tfds_folder.FORMAT
        )
    features = builder.info.features
    columns = _columns(name, builder, _Columns(input, label, owner))
    form = _form(name, features[columns.input], columns.input, side)
    pictures = {n: tensorflow_datasets.decode.SkipDecoding() for n, feature in features.items()
                if isinstance(feature, tensorflow_datasets.features.Image)}
    splits = []
    for split in _splits(name, list(builder.info.splits)):
        with tfds_folder.damage_named(argument, folder):
            source = builder.as_data_source(split, decoders=pictures)
            if form is None:
                splits.append(_numbers(source, columns))
            else:
                shape = (len(source), *_shape(features[columns.input], form))
                splits.append(_images(name, source, columns, form, shape, folder, split))
    labels = features[columns.label]
    train, test = splits[0], splits[-1]
    dataset = from_arrays(
        train[0], train[1], test=test[:2] if test is not train else None, name=name,
        num_classes=getattr(labels, "num_classes", None),
    )
    dataset = dataclasses.replace(dataset, classes=tuple(getattr(labels, "names", None) or ()))
    if not owner:
        return dataset
    return listing.with_clients(dataset, train[2], test[2])


def _columns(name: str, builder: Any, given: _Columns) -> _Columns:
    """The given features, or those that the data set says are input and label."""
    features = builder.info.features
    keys = builder.info.supervised_keys or ("", "")
    input, label = (g or (k if isinstance(k, str) else "")
                    for g, k in zip(given[:2], keys[:2], strict=True))
    columns = _Columns(input, label, given.owner)
    for setting, feature in columns._asdict().items():
        if feature not in features and (feature or setting != "owner"):
            no = f"has no feature {feature!r}" if feature else f"names no {setting}"
            raise errors.UsageError(
                f"{name} {no}: it has {', '.join(sorted(features))}. Name one with "
                f"--config.data.{setting}=..." + errors.did_you_mean(feature, features)
            )
    shape = features[columns.label].shape
    if shape != () or np.dtype(features[columns.label].np_dtype).kind not in "iufb":
        raise errors.UsageError(
            f"{name}: feature {columns.label!r} is {_kind(features[columns.label])}: expected a "
            "class or a number for each example. Name another with --config.data.label=..."
        )
    return columns


def _form(name: str, feature: Any, key: str, side: int) -> decode.Form | None:
    """What images become; None for numbers."""
    import tensorflow_datasets

    is_image = isinstance(feature, tensorflow_datasets.features.Image)
    kind, shape = np.dtype(feature.np_dtype) if feature.np_dtype else None, feature.shape
    if is_image and kind == np.uint8 and (shape[2] or 3) in decode.MODES:
        if None in shape[:2] and not side:
            raise errors.UsageError(
                f"{name}: its images differ in size. Say what they are resized to, e.g. "
                "--config.data.side=224."
            )
        return decode.Form(side, channels=shape[2] or 3)
    numeric = kind is not None and kind.kind in "iufb"
    if is_image or not numeric or not isinstance(shape, tuple) or None in shape:
        raise errors.UsageError(
            f"{name}: feature {key!r} is {_kind(feature)}: expected images of bytes, or numbers of "
            "one shape. Name another with --config.data.input=..."
        )
    if side:
        raise errors.UsageError(f"{name}: data.side is of images, but {key!r} is {_kind(feature)}.")
    return None


def _kind(feature: Any) -> str:
    return f"{type(feature).__name__} of {feature.np_dtype} and shape {feature.shape}"


def _shape(feature: Any, form: decode.Form) -> tuple[int, ...]:
    height, width = (form.side,) * 2 if form.side else feature.shape[:2]
    return height, width, form.channels


def _splits(name: str, there: Sequence[str]) -> list[str]:
    """Train, and test or else validation, if there is one."""
    if "train" not in there:
        raise errors.UsageError(f"{name} has the splits {', '.join(there)}: expected train.")
    tested = next((s for s in ("test", "validation") if s in there), None)
    if tested != "test":
        log.info("%s has no test split: %s is tested on.", name, tested or "train")
    return ["train", *([tested] if tested else [])]


def _numbers(source: Any, columns: _Columns, at_once: int = 1024):
    rows: list[tuple] = []
    for start in range(0, len(source), at_once):
        part = source.__getitems__(list(range(start, min(start + at_once, len(source)))))
        rows += [tuple(x[c] if c else "" for c in columns) for x in part]
    inputs, labels, owners = zip(*rows, strict=True)
    return np.stack(inputs), np.asarray(labels), _texts(owners)


def _images(name: str, source: Any, columns: _Columns, form: decode.Form,
            shape: tuple[int, ...], folder: pathlib.Path, split: str):
    """(images, labels, owners) of a split; of a large one, from its cache if that is there."""
    count, path = shape[0], None
    if math.prod(shape) > IN_MEMORY:
        made_of = sorted(folder.glob(f"*-{split}.{tfds_folder.FORMAT}*"))
        key = files.fingerprint(folder, made_of, decode.VERSION, form, columns, split)
        path = files.cache_folder(folder) / f"{key}.npy"
        beside = path.with_suffix(".npz")
        if path.is_file() and beside.is_file():
            with np.load(beside, allow_pickle=False) as kept:
                images = files.memory_mapped(path, shape, np.uint8)
                return images, kept["labels"], kept["owners"]
    labels: list[Any] = [None] * count
    owners: list[Any] = [""] * count

    def fetch(which: range) -> list[bytes]:
        examples = source.__getitems__(list(which))
        for i, example in zip(which, examples, strict=True):
            labels[i] = example[columns.label]
            if columns.owner:
                owners[i] = example[columns.owner]
        return [example[columns.input] for example in examples]

    try:
        images = decode.filled(name, path, shape, fetch,
                               lambda content: decode.picture(content, form))
    except decode.Unreadable as e:
        raise errors.UsageError(
            f"{name}: {len(e.which)} images of split {split} cannot be decoded, the first is "
            f"number {e.which[0]} ({e.why}). Prepare the data set again."
        ) from e
    found = np.asarray(labels), _texts(owners)
    if path is not None:
        with files.written_whole(beside) as partial, open(partial, "wb") as file:
            np.savez(file, labels=found[0], owners=found[1])
    return images, *found


def _texts(owners: Sequence[Any]) -> np.ndarray:
    """Clients by name or number; texts come as bytes."""
    return np.asarray([o.decode() if isinstance(o, bytes) else o for o in owners])


SOURCES.add("tfds", Source(
    tfds,
    about="any of the hundreds of tensorflow-datasets with images or numbers",
    size="any",
    licence="see the catalogue: tensorflow.org/datasets",
    files="tensorflow_datasets/NAME/[CONFIG/]VERSION/, by `fedjax-flat prepare tfds:NAME`",
    here=tfds_folder.is_here,
    settings={
        "input": Setting("", "feature that is the input; '' as the data set says"),
        "label": Setting("", "feature that is the label; '' as the data set says"),
        "owner": Setting("", "feature whose values are the natural clients, e.g. user_id"),
        "side": Setting(0, "to resize images to, in pixels; 0 is none", at_least=0),
    },
    argument="NAME[/CONFIG]",
))
