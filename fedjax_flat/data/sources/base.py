"""What a data set is, and the table of all that can be loaded by name.

A source is a function from a folder to a `Dataset`, with what a person must know to use it. Names
may carry an argument after a colon, `tfds:mnist`, for sources that are many.
"""

import dataclasses
import logging
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_flat import disk, errors
from fedjax_flat.registry import Registry
from fedjax_flat.settings import Settings, check_options

DATA_VARIABLE = "FEDJAX_FLAT_DATA"
MOST_FOR_STATISTICS = 10_000

log = logging.getLogger(__name__)


class Examples(NamedTuple):
    """Trees of arrays with examples first: inputs, and labels (classes are whole numbers)."""

    inputs: Any
    labels: Any


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Train and test examples with what a model needs to know about them.

    Inputs are normalised as (x / max_value - mean) / std, channel by channel; without a mean they
    are left as they are. `task` is what is learned from them unless a config says otherwise.
    """

    name: str
    train: Examples
    test: Examples
    num_classes: int
    max_value: float = 1.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    task: str = "classification"
    owners: np.ndarray | None = None  # natural client of each train example, 0 .. K - 1
    test_owners: np.ndarray | None = None  # of each test example; -1 is nobody's
    clients: tuple[str, ...] = ()  # names of the natural clients
    classes: tuple[str, ...] = ()  # names of the classes, or the tokens of a vocabulary
    coarse: tuple[int, ...] = ()  # superclass of each class
    parts: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)  # of test: positions
    colours: tuple[tuple[int, int, int], ...] = ()  # of each class, in pictures of labels
    queries: np.ndarray | None = None  # of retrieval: train examples that were taken as queries

    @property
    def input_shape(self) -> Any:
        """Of one example: (height, width, channels) of an image."""
        return jax.tree.map(lambda x: tuple(x.shape[1:]), self.train.inputs)

    @property
    def inputs(self) -> Any:
        """Shape and type of a batch of one example, as a network reads it."""

        def spec(x):
            kind = "float32" if self.mean or x.dtype.kind == "f" else x.dtype.name
            narrow = {"int64": "int32", "uint64": "uint32"}
            return jax.ShapeDtypeStruct((1, *x.shape[1:]), narrow.get(kind, kind))

        return jax.tree.map(spec, self.train.inputs)

    def split(self, name: str) -> Examples:
        """The examples of split `train` or `test`, or of a part of test that has a name."""
        everything = slice(None)
        known: dict[str, Any] = {"train": everything, "test": everything, **self.parts}
        where = errors.lookup("split", name, known)
        examples = self.train if name == "train" else self.test
        return examples if where is everything else jax.tree.map(
            lambda x: np.asarray(x)[where], examples
        )


def count_of(examples: Examples) -> int:
    """How many there are; an error if arrays disagree."""
    counts = {np.shape(x)[0] if np.ndim(x) else 0 for x in jax.tree.leaves(examples)}
    if len(counts) != 1:
        shapes = [np.shape(x) for x in jax.tree.leaves(examples)]
        raise errors.UsageError(
            f"inputs and labels of shapes {', '.join(map(str, shapes))}: expected as many labels "
            "as inputs, along the first axis."
        )
    return counts.pop()


def from_arrays(
    inputs: Any,
    labels: Any,
    *,
    test: tuple[Any, Any] | None = None,
    num_classes: int | None = None,
    name: str = "arrays",
    max_value: float = 1.0,
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    task: str | None = None,
    owners: Any = None,
) -> Dataset:
    """A data set of arrays, or trees of arrays, in the types they have.

    Whole-number labels are classes, 0 to num_classes - 1 (by default the largest label says how
    many); others are numbers to predict. Without `test`, the train examples are tested on. Images
    of bytes are normalised by their channels' mean and deviation; everything else enters a network
    as it is, unless `mean` and `std` are given. `owners` names the natural client of each train
    example, by any values. Memory-mapped arrays stay on disk.
    """
    as_array = lambda x: x if isinstance(x, np.memmap) else np.asarray(x)
    as_examples = lambda x, y: Examples(jax.tree.map(as_array, x), jax.tree.map(as_array, y))
    train = as_examples(inputs, labels)
    tested = train if test is None else as_examples(*test)
    for examples in (train, tested):
        if count_of(examples) == 0:
            raise errors.UsageError(f"data set {name!r} has no examples.")
        wrong = [x.dtype for x in jax.tree.leaves(examples) if x.dtype.kind not in "fiub"]
        if wrong:
            raise errors.UsageError(
                f"data set {name!r} has examples of type {wrong[0]}: expected numbers. Encode text "
                "and categories first."
            )
    leaves = jax.tree.leaves((train.labels, tested.labels))
    classes = all(x.dtype.kind in "iub" for x in leaves)
    if len(mean) != len(std):
        raise errors.UsageError(f"mean has {len(mean)} values, std {len(std)}: give both or none.")
    if num_classes is None and classes and any(x.ndim > 1 for x in leaves):
        raise errors.UsageError(
            f"labels of shape {leaves[0].shape}: say num_classes, because some labels of pixels "
            "may be no class."
        )
    if num_classes is None:
        num_classes = 1 + max(int(x.max()) for x in leaves) if classes else 0
    images = jax.tree.leaves(train.inputs)
    if not mean and len(images) == 1 and images[0].ndim in (3, 4) and images[0].dtype == np.uint8:
        max_value = 255.0  # pixels: normalised by what the train images have
        mean, std = channel_statistics(name, images[0])
    task = task or ("classification" if classes else "regression")
    names: tuple[str, ...] = ()
    if owners is not None:
        names, owners = numbered(owners)
        if len(owners) != count_of(train):
            raise errors.UsageError(
                f"owners of {len(owners)} examples, but there are {count_of(train)}: expected one "
                "for each train example."
            )
    return Dataset(name, train, tested, num_classes, max_value, mean, std, task, owners,
                   clients=names)


def channel_statistics(
    name: str, images: np.ndarray
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel of bytes, as numbers from 0 to 1.

    Of memory-mapped images, at most 10,000 are read.
    """
    count = len(images)
    most = min(count, MOST_FOR_STATISTICS) if isinstance(images, np.memmap) else count
    if most < count:
        log.info("%s: means and deviations of the channels are those of %d images, evenly spaced "
                 "among %d.", name, most, count)
    which = np.linspace(0, count - 1, most).astype(int)
    channels = images.shape[-1] if images.ndim == 4 else 1
    total = np.zeros((2, channels))
    for part in np.array_split(which, -(-most // 100)):
        pixels = images[part].reshape(-1, channels).astype(np.float64) / 255
        total += pixels.sum(0), (pixels**2).sum(0)
    mean, square = total / (most * math.prod(images.shape[1:3]))
    deviation = np.sqrt(np.maximum(square - mean**2, 0)) + 1e-6
    return tuple(mean.tolist()), tuple(deviation.tolist())


def numbered(values: Any) -> tuple[tuple[str, ...], np.ndarray]:
    """(sorted names, number of each value): natural clients, or classes, given by name."""
    names, numbers = np.unique(np.asarray(values), return_inverse=True)
    return tuple(map(str, names.tolist())), numbers.reshape(-1).astype(np.int32)


def drawn_anew(train: Examples, test: Examples, share: float) -> tuple[Examples, Examples]:
    """(train, test) of both together, `share` of them in test, at random but always alike."""
    joined = jax.tree.map(lambda a, b: np.concatenate([a, b]), train, test)
    count = count_of(joined)
    order = np.random.default_rng([0, 6]).permutation(count)
    cut = round((1 - share) * count)
    parts = np.sort(order[:cut]), np.sort(order[cut:])
    return tuple(jax.tree.map(lambda x, i=i: x[i], joined) for i in parts)


def check_labels(dataset: Dataset, ignored: int | None = None) -> None:
    """Refuses a class outside 0 .. num_classes - 1, and says which and where."""
    for split in ("train", "test"):
        for labels in jax.tree.leaves(dataset.split(split).labels):
            labels = np.asarray(labels)
            if labels.dtype.kind not in "iub":
                continue
            wrong = (labels < 0) | (labels >= dataset.num_classes)
            if ignored is not None:
                wrong &= labels != ignored
            if wrong.any():
                place = tuple(int(i) for i in np.argwhere(wrong)[0])
                where = place[0] if len(place) == 1 else place
                raise errors.UsageError(
                    f"{dataset.name}: label {labels[place]} of {split} example {where} is no class:"
                    f" expected 0 to {dataset.num_classes - 1} ({int(wrong.sum())} such labels)."
                )


class Source(NamedTuple):
    """`load(data_dir, **settings) -> Dataset`, and what `fedjax-flat datasets` says of it.

    With an `argument`, what stands after the colon of the name comes second: load(data_dir, text).
    """

    load: Callable[..., Dataset]
    about: str
    size: str
    licence: str
    files: str  # what to put where, relative to the data folder
    here: Callable[[pathlib.Path | None], bool]  # whether it is there
    settings: Settings = {}  # noqa: RUF012 (never changed)
    argument: str = ""  # 'NAME[/CONFIG]'


class _Sources(Registry[Source]):
    def find(self, name: str) -> Source:
        """The source of `mnist` or `tfds:mnist`, or an error that suggests the nearest."""
        known, colon, argument = name.partition(":")
        source = super().find(known)
        if source.argument and not argument:
            raise errors.UsageError(
                f"dataset {known!r}: expected {known}:{source.argument}, e.g. --config.data.name="
                f"{known}:..."
            )
        if colon and not source.argument:
            raise errors.UsageError(f"dataset {name!r}: {known} takes nothing after a colon.")
        return source


SOURCES = _Sources("dataset")


def data_folder(data_dir: str | os.PathLike | None) -> pathlib.Path | None:
    """Where data are: `data_dir`, or what the environment variable FEDJAX_FLAT_DATA says."""
    folder = data_dir or os.environ.get(DATA_VARIABLE)
    return disk.folder("data folder", folder) if folder else None


def load(name: str, data_dir: str | os.PathLike | None = None, **settings: Any) -> Dataset:
    """Loads dataset `name`; `data_dir` defaults to the environment variable FEDJAX_FLAT_DATA."""
    source = SOURCES.find(name)
    check_options(f"dataset {name}", source.settings, settings)
    given = {n: s.default for n, s in source.settings.items()} | settings
    argument = (name.partition(":")[2],) if source.argument else ()
    dataset = source.load(data_folder(data_dir), *argument, **given)
    if not isinstance(dataset, Dataset):
        raise errors.UsageError(
            f"dataset {name} is a {type(dataset).__name__}: expected fedjax_flat.data.Dataset, as "
            "from_arrays makes one."
        )
    return dataset
