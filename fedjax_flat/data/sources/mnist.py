"""MNIST and Fashion-MNIST from their four idx files, packed as published or unpacked.

An idx file is a magic number (two zero bytes, the type, the number of axes), the length of each
axis as a big-endian 32-bit number, and the values. What is compared with the md5 of the original is
the unpacked content, because distributions pack it differently: Debian's Fashion-MNIST has other
gzip headers than its authors'.
"""

import functools
import gzip
import pathlib
import struct
import zlib
from typing import NamedTuple

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.sources import files
from fedjax_flat.data.sources.base import SOURCES, Dataset, Examples, Source, drawn_anew
from fedjax_flat.settings import Setting

_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte",
          "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


class _Idx(NamedTuple):
    folders: tuple[str, ...]  # of the data folder
    system: pathlib.Path | None  # where a system's packages put it
    md5: tuple[str, ...]  # of what _NAMES hold, unpacked
    classes: tuple[str, ...]
    mean: float
    std: float


_MNIST = _Idx(
    folders=("mnist", "MNIST/raw"),
    system=None,
    md5=("6bbc9ace898e44ae57da46a324031adb", "a25bea736e30d166cdddb491f175f624",
         "2646ac647ad5339dbf082846283269ea", "27ae3e4e09519cfbb04c329615203637"),
    classes=tuple("0123456789"),
    mean=0.1307,
    std=0.3081,
)
_FASHION = _Idx(
    folders=("fashion-mnist", "FashionMNIST/raw"),
    system=pathlib.Path("/usr/share/datasets/fashion-mnist"),  # Debian: dataset-fashion-mnist
    md5=("f4a8712d7a061bf5bd6d2ca38dc4d50a", "9018921c3c673c538a1fc5bad174d6f9",
         "8181f5470baa50b63fa0f6fddb340f0a", "15d484375f8d13e6eb1aabb0c3f46965"),
    classes=("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker",
             "bag", "ankle boot"),
    mean=0.2860,
    std=0.3530,
)


def mnist(data_dir, test_share: float = 0.0) -> Dataset:
    """MNIST: 60,000 train and 10,000 test images of handwritten digits, 28x28x1."""
    return _load("mnist", _MNIST, data_dir, test_share)


def fashion_mnist(data_dir, test_share: float = 0.0) -> Dataset:
    """Fashion-MNIST: 60,000 train and 10,000 test images of clothes, 28x28x1."""
    return _load("fashion_mnist", _FASHION, data_dir, test_share)


def _load(name: str, spec: _Idx, data_dir: pathlib.Path | None, test_share: float) -> Dataset:
    wanted = [f"{folder}/{_NAMES[0]}.gz" for folder in spec.folders]
    folder = (_find(spec, data_dir) or files.need(name, data_dir, wanted)).parent
    arrays = [_read(folder, n, md5) for n, md5 in zip(_NAMES, spec.md5, strict=True)]
    train, test = (Examples(arrays[i][..., None], arrays[i + 1].astype(np.int32)) for i in (0, 2))
    if test_share:
        train, test = drawn_anew(train, test, test_share)
    return Dataset(name, train, test, 10, 255.0, (spec.mean,), (spec.std,), classes=spec.classes)


def _find(spec: _Idx, data_dir: pathlib.Path | None) -> pathlib.Path | None:
    """The train images."""
    names = (f"{_NAMES[0]}.gz", _NAMES[0])
    return files.find(data_dir, [f"{folder}/{n}" for folder in spec.folders for n in names]) or (
        files.find(spec.system, names))


def _is_here(spec: _Idx, data_dir: pathlib.Path | None) -> bool:
    return _find(spec, data_dir) is not None


def _read(folder: pathlib.Path, name: str, md5: str) -> np.ndarray:
    path = files.need(folder.name, folder, [f"{name}.gz", name])
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error) as e:
            raise errors.UsageError(
                f"{path}: {len(content):,} bytes that cannot be unpacked ({e}). The file is "
                "truncated or altered: delete it and download it again."
            ) from e
    array = read_idx(path, content, axes=int(name[-7]))
    files.check_md5(f"{path}, unpacked", content, md5)
    return array


def read_idx(path, content: bytes, *, axes: int) -> np.ndarray:
    """The bytes of an idx file of unsigned bytes with so many axes."""
    expected = struct.pack(">HBB", 0, 8, axes)
    if content[:4] != expected:
        raise errors.UsageError(
            f"{path}: starts with {content[:4].hex()}, but an idx file of bytes along {axes} "
            f"{'axis' if axes == 1 else 'axes'} starts with {expected.hex()}. It is another file "
            "under this name."
        )
    start = 4 + 4 * axes
    shape = struct.unpack(f">{axes}I", content[4:start].ljust(4 * axes, b"\0"))
    if len(content) != start + np.prod(shape):
        raise errors.UsageError(
            f"{path}: {len(content):,} bytes unpacked, but its header says {start} + "
            f"{' x '.join(map(str, shape))} = {start + np.prod(shape):,}. The file is truncated or "
            "altered: delete it and download it again."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


for _load_one, _spec, _about, _bytes, _licence in (
    (mnist, _MNIST, "handwritten digits", 12, "CC BY-SA 3.0, as commonly given for it"),
    (fashion_mnist, _FASHION, "photographs of clothes", 31, "MIT"),
):
    SOURCES.add(_load_one.__name__, Source(
        _load_one,
        about=_about,
        size=f"60,000 + 10,000 images of 28x28x1, 10 classes, {_bytes} MB",
        licence=_licence,
        files=f"{', '.join(f'{n}.gz' for n in _NAMES)} in "
              f"{' or '.join(f'{f}/' for f in (*_spec.folders, *filter(None, [_spec.system])))}",
        here=functools.partial(_is_here, _spec),
        settings={"test_share": Setting(
            0.0, "of all 70,000, drawn at random; 0 is the published test set", at_least=0, below=1
        )},
    ))
