"""Where examples come from: name -> arrays.

`digits` ships inside scikit-learn. CIFAR-10 and CIFAR-100 are read from the original archives
(`cifar-10-python.tar.gz`, `cifar-100-python.tar.gz`) or from the folders inside them. Those files
are Python pickles: every one is compared with the md5 of the original distribution before it is
opened, and then read by an unpickler that can build NumPy arrays and nothing else.
"""

import dataclasses
import hashlib
import io
import os
import pathlib
import pickle
import tarfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_flat import errors
from fedjax_flat.registry import Registry

DATA_VARIABLE = "FEDJAX_FLAT_DATA"


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
        """The examples of split `train` or `test`."""
        return errors.lookup("split", name, {"train": self.train, "test": self.test})


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
) -> Dataset:
    """A data set of arrays, or trees of arrays, in the types they have.

    Whole-number labels are classes, 0 to num_classes - 1 (by default the largest label says how
    many); others are numbers to predict. Without `test`, the train examples are tested on. Images
    of bytes are normalised by their channels' mean and deviation; everything else enters a network
    as it is, unless `mean` and `std` are given.
    """
    as_examples = lambda x, y: Examples(jax.tree.map(np.asarray, x), jax.tree.map(np.asarray, y))
    train = as_examples(inputs, labels)
    tested = train if test is None else as_examples(*test)
    for examples in (train, tested):
        if count_of(examples) == 0:
            raise errors.UsageError(f"data set {name!r} has no examples.")
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
        channels = images[0].shape[-1] if images[0].ndim == 4 else 1
        scaled = images[0].reshape(-1, channels) / max_value
        mean, std = tuple(scaled.mean(0).tolist()), tuple((scaled.std(0) + 1e-6).tolist())
    task = task or ("classification" if classes else "regression")
    return Dataset(name, train, tested, num_classes, max_value, mean, std, task)


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


def load(name: str, data_dir: str | os.PathLike | None = None) -> Dataset:
    """Loads dataset `name`; `data_dir` defaults to the environment variable FEDJAX_FLAT_DATA."""
    dataset = SOURCES.find(name)(data_dir or os.environ.get(DATA_VARIABLE))
    if not isinstance(dataset, Dataset):
        raise errors.UsageError(
            f"dataset {name} is a {type(dataset).__name__}: expected fedjax_flat.data.Dataset, as "
            "from_arrays makes one."
        )
    return dataset


def digits(data_dir=None) -> Dataset:
    """Handwritten digits, 8x8, 1,797 images (UCI, inside scikit-learn).

    Every fifth image of each class is a test image: 1,442 train and 355 test.
    """
    del data_dir
    from sklearn import datasets  # a second of import time that CIFAR users need not pay

    raw = datasets.load_digits()
    images = raw.images.astype(np.uint8)[..., None]
    labels = raw.target.astype(np.int32)
    rank = np.zeros(len(labels), int)
    for c in range(10):
        rank[labels == c] = np.arange(np.sum(labels == c))
    test = rank % 5 == 4
    train = Examples(images[~test], labels[~test])
    scaled = train.inputs / 16
    return Dataset(
        name="digits",
        train=train,
        test=Examples(images[test], labels[test]),
        num_classes=10,
        max_value=16.0,
        mean=(float(scaled.mean()),),
        std=(float(scaled.std()),),
    )


class _Cifar(NamedTuple):
    archive: str
    archive_md5: str
    folder: str
    train: dict[str, str]  # file -> md5, in the order that defines the indices
    test: dict[str, str]
    label_key: bytes
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


# Means and deviations are those of the FedSAM release.
_CIFAR10 = _Cifar(
    archive="cifar-10-python.tar.gz",
    archive_md5="c58f30108f718f92721af3b95e74349a",
    folder="cifar-10-batches-py",
    train={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    },
    test={"test_batch": "40351d587109b95175f43aff81a1287e"},
    label_key=b"labels",
    num_classes=10,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2023, 0.1994, 0.2010),
)
_CIFAR100 = _Cifar(
    archive="cifar-100-python.tar.gz",
    archive_md5="eb9058c3a382ffc7106e4002c42a8d85",
    folder="cifar-100-python",
    train={"train": "16019d7e3df5f24257cddd939b257f8d"},
    test={"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
    label_key=b"fine_labels",
    num_classes=100,
    mean=(0.5071, 0.4867, 0.4408),
    std=(0.2675, 0.2565, 0.2761),
)


def cifar10(data_dir) -> Dataset:
    """CIFAR-10: 50,000 train and 10,000 test images of 32x32x3."""
    return _load_cifar("cifar10", _CIFAR10, data_dir)


def cifar100(data_dir) -> Dataset:
    """CIFAR-100 with fine labels."""
    return _load_cifar("cifar100", _CIFAR100, data_dir)


SOURCES: Registry[Callable[..., Dataset]] = Registry("dataset")
for _name, _load in {"digits": digits, "cifar10": cifar10, "cifar100": cifar100}.items():
    SOURCES.add(_name, _load)


def _load_cifar(name: str, spec: _Cifar, data_dir) -> Dataset:
    files = _read_files(name, spec, data_dir)
    splits = {}
    for split, members in (("train", spec.train), ("test", spec.test)):
        parts = []
        for member, md5 in members.items():
            _check_md5(f"{spec.folder}/{member}", files[member], md5)
            parts.append(_ArrayUnpickler(io.BytesIO(files[member]), encoding="bytes").load())
        pixels = np.concatenate([p[b"data"] for p in parts]).reshape(-1, 3, 32, 32)
        splits[split] = Examples(
            inputs=np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)),
            labels=np.concatenate([np.asarray(p[spec.label_key], np.int32) for p in parts]),
        )
    return Dataset(name, splits["train"], splits["test"], spec.num_classes, 255.0, spec.mean,
                   spec.std)


def _read_files(name: str, spec: _Cifar, data_dir) -> dict[str, bytes]:
    """The bytes of every file of the dataset, from its folder or else from its archive."""
    wanted = [*spec.train, *spec.test]
    if data_dir is not None:
        root = pathlib.Path(data_dir)
        folder = root if root.name == spec.folder else root / spec.folder
        if folder.is_dir():
            missing = [f for f in wanted if not (folder / f).is_file()]
            if missing:
                raise errors.UsageError(
                    f"{name}: {folder} lacks {', '.join(missing)}; expected "
                    f"{', '.join(wanted)} as in {spec.archive}. Extract the archive again."
                )
            return {f: (folder / f).read_bytes() for f in wanted}
        archive = root if root.name == spec.archive else root / spec.archive
        if archive.is_file():
            content = archive.read_bytes()
            _check_md5(str(archive), content, spec.archive_md5)
            with tarfile.open(fileobj=io.BytesIO(content)) as tar:
                members = {f: tar.extractfile(f"{spec.folder}/{f}") for f in wanted}
                return {f: m.read() for f, m in members.items() if m is not None}
    given = f"{data_dir} holds neither" if data_dir else "no data folder was given; it must hold"
    raise errors.UsageError(
        f"{name}: {given} {spec.archive} {'nor' if data_dir else 'or'} {spec.folder}/. Put the "
        f"original archive, or the folder inside it, there and name it with --data or "
        f"{DATA_VARIABLE}."
    )


def _check_md5(path: str, content: bytes, expected: str) -> None:
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != expected:
        raise errors.UsageError(
            f"{path}: md5 {found}, but the original has {expected} ({len(content):,} bytes here). "
            "The file is truncated or altered: delete it and download it again."
        )


class _ArrayUnpickler(pickle.Unpickler):
    """Builds dicts, lists, bytes and NumPy arrays; refuses everything else."""

    _ALLOWED = {  # noqa: RUF012 (a constant)
        ("numpy.core.multiarray", "_reconstruct"): "numpy._core.multiarray",
        ("numpy", "ndarray"): "numpy",
        ("numpy", "dtype"): "numpy",
    }

    def find_class(self, module: str, name: str):
        if (module, name) not in self._ALLOWED:
            raise errors.UsageError(f"refused to unpickle {module}.{name}: not part of CIFAR files")
        return super().find_class(self._ALLOWED[module, name], name)
