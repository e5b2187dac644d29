"""CIFAR-10 and CIFAR-100 from the original archives, or from the folders inside them.

Those files are Python pickles: every one is compared with the md5 of the original distribution
before it is opened, and then read by an unpickler that can build NumPy arrays and nothing else.
"""

import dataclasses
import io
import pathlib
import pickle
import tarfile
from typing import NamedTuple

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.sources import files
from fedjax_flat.data.sources.base import SOURCES, Dataset, Examples, Source
from fedjax_flat.settings import Setting


class _Cifar(NamedTuple):
    archive: str
    archive_md5: str
    folder: str
    train: dict[str, str]  # file -> md5, in the order that defines the indices
    test: dict[str, str]
    names: tuple[str, str, bytes]  # file of the classes' names, its md5, their key
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
    names=("batches.meta", "5ff9c542aee3614f3951f8cda6e48888", b"label_names"),
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
    names=("meta", "7973b15100ade9c7d40fb424638fde48", b"fine_label_names"),
    label_key=b"fine_labels",
    num_classes=100,
    mean=(0.5071, 0.4867, 0.4408),
    std=(0.2675, 0.2565, 0.2761),
)


def cifar10(data_dir) -> Dataset:
    """CIFAR-10: 50,000 train and 10,000 test images of 32x32x3."""
    return _load_cifar("cifar10", _CIFAR10, data_dir)[0]


def cifar100(data_dir, labels: str = "fine") -> Dataset:
    """CIFAR-100 with its 100 fine labels, or with their 20 superclasses."""
    fine, (train, test) = _load_cifar("cifar100", _CIFAR100, data_dir)
    of_class = dict(zip(fine.train.labels.tolist(), train.tolist(), strict=True))
    if labels == "fine":
        return dataclasses.replace(fine, coarse=tuple(of_class[c] for c in sorted(of_class)))
    return dataclasses.replace(
        fine, num_classes=20, classes=(),
        train=fine.train._replace(labels=train), test=fine.test._replace(labels=test),
    )


def _load_cifar(name: str, spec: _Cifar, data_dir) -> tuple[Dataset, list[np.ndarray]]:
    """The data set, and the coarse labels of train and test where the files have them."""
    content = _read_files(name, spec, data_dir)
    read = lambda member: _ArrayUnpickler(io.BytesIO(content[member]), encoding="bytes").load()
    splits, coarse = [], []
    for members in (spec.train, spec.test):
        for member, md5 in members.items():
            files.check_md5(f"{spec.folder}/{member}", content[member], md5)
        parts = [read(member) for member in members]
        pixels = np.concatenate([p[b"data"] for p in parts]).reshape(-1, 3, 32, 32)
        of = lambda key, parts=parts: np.concatenate([np.asarray(p[key], np.int32) for p in parts])
        splits.append(Examples(np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)),
                               of(spec.label_key)))
        if b"coarse_labels" in parts[0]:
            coarse.append(of(b"coarse_labels"))
    names, md5, key = spec.names
    classes: tuple[str, ...] = ()
    if names in content:
        files.check_md5(f"{spec.folder}/{names}", content[names], md5)
        classes = tuple(c.decode() for c in read(names)[key])
    dataset = Dataset(name, splits[0], splits[1], spec.num_classes, 255.0, spec.mean, spec.std,
                      classes=classes)
    return dataset, coarse


def _read_files(name: str, spec: _Cifar, data_dir) -> dict[str, bytes]:
    """The bytes of every file of the dataset, from its folder or else from its archive."""
    wanted, names = [*spec.train, *spec.test], spec.names[0]
    root = pathlib.Path(data_dir) if data_dir else None
    if root and root.name in (spec.folder, spec.archive):
        root = root.parent
    found = files.need(name, root, [spec.folder, spec.archive])
    if found.is_dir():
        missing = [f for f in wanted if not (found / f).is_file()]
        if missing:
            raise errors.UsageError(
                f"{name}: {found} lacks {', '.join(missing)}; expected "
                f"{', '.join(wanted)} as in {spec.archive}. Extract the archive again."
            )
        return {f: (found / f).read_bytes() for f in (*wanted, names) if (found / f).is_file()}
    archive = found.read_bytes()
    files.check_md5(str(found), archive, spec.archive_md5)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        there = set(tar.getnames())
        members = {f: tar.extractfile(f"{spec.folder}/{f}") for f in (*wanted, names)
                   if f"{spec.folder}/{f}" in there}
        return {f: m.read() for f, m in members.items() if m is not None}


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


_LABELS = {"labels": Setting("fine", "or the 20 superclasses", choices=("fine", "coarse"))}
for _load, _spec, _bytes in ((cifar10, _CIFAR10, 170), (cifar100, _CIFAR100, 169)):
    SOURCES.add(_load.__name__, Source(
        _load,
        about=f"photographs of {_spec.num_classes} kinds of things",
        size=f"50,000 + 10,000 images of 32x32x3, {_spec.num_classes} classes, {_bytes} MB",
        licence="none stated by its authors; cite Krizhevsky 2009",
        files=f"{_spec.archive}, or the folder {_spec.folder}/ inside it",
        here=files.is_here(_spec.folder, _spec.archive),
        settings=_LABELS if _spec is _CIFAR100 else {},
    ))
