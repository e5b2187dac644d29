"""Files of weights as NumPy arrays by name; nothing that a file says is ever executed.

What a file is, its first bytes say: `.safetensors`; `.npz` (never with pickled objects); flax's
`.msgpack`, nested dicts of arrays; torch's `.pt` and `.pth`, both the zip archives of torch 1.6 and
later and the older files. Torch's are pickles with the tensors' bytes beside them. The unpickler
here knows dicts, the types of storages and the marks that say "a tensor of this storage, offset,
shape and strides"; it refuses every other name, and no mark makes it read outside the storage.
Torch itself is not needed.

Layout of an old torch file: five pickles (a magic number, 1001, facts about the writer's machine,
the tree with marks, the storages' names in order), then for each storage its length as an int64 and
its bytes. Of a zip archive: `NAME/data.pkl`, the tree, and `NAME/data/KEY`, the storages.
"""

import collections
import io
import os
import pathlib
import pickle
import struct
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax
import ml_dtypes
import numpy as np

from fedjax_flat import errors

MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
TYPES = {
    "FloatStorage": "<f4", "DoubleStorage": "<f8", "HalfStorage": "<f2", "LongStorage": "<i8",
    "IntStorage": "<i4", "ShortStorage": "<i2", "CharStorage": "i1", "ByteStorage": "u1",
    "BoolStorage": "?", "BFloat16Storage": ml_dtypes.bfloat16,
}


class _Refused(Exception):
    """What is wrong with a file, without its name."""


class _Storage(NamedTuple):
    kind: str
    key: str
    size: int

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(TYPES[self.kind])


class _Mark(NamedTuple):
    """A tensor whose numbers are read after the pickle."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def load_weights(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """The arrays of a file by name; names within nested dicts are joined by dots, flax's by /."""
    path = pathlib.Path(path).expanduser()
    if not path.is_file():
        raise errors.UsageError(f"weights {path}: no such file.")
    data = path.read_bytes()
    try:
        return _reader(data)(data)
    except _Refused as e:
        raise errors.UsageError(f"weights {path}: {e}") from e
    except (pickle.UnpicklingError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, TypeError,
            KeyError, IndexError, AttributeError, RuntimeError, struct.error, ImportError) as e:
        raise errors.UsageError(
            f"weights {path}: the file is damaged or cut short ({type(e).__name__}: {e})."
        ) from e


def _reader(data: bytes):
    if data[:4] == b"PK\x03\x04":
        return _zip
    if data[8:9] == b"{":
        return _safetensors
    if data[:1] == b"\x80":
        return _old_torch
    if _begins_a_dict(data):
        return _msgpack
    raise _Refused(
        "expected .safetensors, .npz, .msgpack, or a torch file; it begins like none of these."
    )


def _begins_a_dict(data: bytes) -> bool:
    """Whether it is msgpack's mark of a dict, and the first key is a string."""
    first = data[:1]
    after = 1 if b"\x81" <= first <= b"\x8f" else {b"\xde": 3, b"\xdf": 5}.get(first, 0)
    key = data[after : after + 1]
    return bool(after) and (b"\xa0" <= key <= b"\xbf" or b"\xd9" <= key <= b"\xdb")


def _msgpack(data: bytes) -> dict[str, np.ndarray]:
    tree = flax.serialization.msgpack_restore(data)
    found = flax.traverse_util.flatten_dict(tree, sep="/")
    wrong = next((n for n, a in found.items() if not isinstance(a, np.ndarray)), None)
    if wrong is not None:
        raise _Refused(f"{wrong} is a {type(found[wrong]).__name__}; expected arrays only.")
    return found


def _safetensors(data: bytes) -> dict[str, np.ndarray]:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as e:
        raise _Refused("safetensors is missing: pip install 'fedjax-flat[pretrained]'.") from e
    try:
        return dict(safetensors.numpy.load(data))
    except safetensors.SafetensorError as e:
        raise _Refused(f"the file is damaged or cut short ({e}).") from e


def _zip(data: bytes) -> dict[str, np.ndarray]:
    archive = zipfile.ZipFile(io.BytesIO(data))
    trees = [n for n in archive.namelist() if n == "data.pkl" or n.endswith("/data.pkl")]
    if not trees:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
        if not all(isinstance(a, np.ndarray) for a in found.values()):
            raise _Refused("a zip archive, but neither of NumPy arrays nor of torch.")
        return found
    root = trees[0].removesuffix("data.pkl")
    if f"{root}byteorder" in archive.namelist():
        order = archive.read(f"{root}byteorder")
        if order != b"little":
            raise _Refused(f"written with byte order {order!r}; expected little.")
    marks = _marks(_Unpickler(io.BytesIO(archive.read(trees[0]))).load())
    storages = {}
    for mark in marks.values():
        storage, name = mark.storage, f"{root}data/{mark.storage.key}"
        size = archive.getinfo(name).file_size
        if size != storage.size * storage.dtype.itemsize:
            raise _Refused(f"{name} has {size} bytes; its {storage.size} numbers need another.")
        if storage.key not in storages:
            storages[storage.key] = np.frombuffer(archive.read(name), storage.dtype)
    return {name: _tensor(name, mark, storages) for name, mark in marks.items()}


def _old_torch(data: bytes) -> dict[str, np.ndarray]:
    file = io.BytesIO(data)
    read = lambda: _Unpickler(file).load()
    if read() != MAGIC or read() != PROTOCOL:
        raise _Refused("a pickle, but not one of torch.")
    if not read().get("little_endian", True):
        raise _Refused("written on a big-endian machine; expected little-endian.")
    marks, keys = _marks(read()), read()
    kinds = {mark.storage.key: mark.storage for mark in marks.values()}
    storages = {}
    for key in keys:
        (count,) = struct.unpack("<q", file.read(8))
        if key not in kinds:
            raise _Refused(f"storage {key!r} belongs to no tensor, so its type is unknown.")
        numbers = file.read(count * kinds[key].dtype.itemsize) if count >= 0 else b""
        if count < 0 or len(numbers) != count * kinds[key].dtype.itemsize:
            raise _Refused("the file is cut short.")
        storages[key] = np.frombuffer(numbers, kinds[key].dtype)
    return {name: _tensor(name, mark, storages) for name, mark in marks.items()}


class _Unpickler(pickle.Unpickler):
    """Dicts, numbers, strings, and marks."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, shape, strides, *rest: _mark(
                storage, offset, shape, strides
            )
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda tensor, *rest: tensor
        if module == "torch" and name in TYPES:
            return name
        raise _Refused(
            f"it names {module}.{name}, which is refused: expected dicts of tensors only, as "
            "torch.save(model.state_dict(), FILE) writes them."
        )

    def persistent_load(self, pid: Any) -> _Storage:
        what, kind, key, _, size, *_ = pid
        if what != "storage" or kind not in TYPES:
            raise _Refused(f"it has a record {what!r} of {kind!r}; expected storages of numbers.")
        return _Storage(kind, str(key), int(size))


def _mark(storage: Any, offset: Any, shape: Any, strides: Any) -> _Mark:
    if not isinstance(storage, _Storage):
        raise _Refused(f"a tensor's storage is {storage!r}.")
    return _Mark(storage, int(offset), tuple(map(int, shape)), tuple(map(int, strides)))


def _marks(tree: Any, prefix: str = "") -> dict[str, _Mark]:
    """The tensors of nested dicts; whatever else stands beside them is left out."""
    if not isinstance(tree, Mapping):
        raise _Refused(f"it holds a {type(tree).__name__}; expected a dict of tensors.")
    found = {}
    for name, value in tree.items():
        if isinstance(value, _Mark):
            found[f"{prefix}{name}"] = value
        elif isinstance(value, Mapping):
            found.update(_marks(value, f"{prefix}{name}."))
    return found


def _tensor(name: str, mark: _Mark, storages: Mapping[str, np.ndarray]) -> np.ndarray:
    flat = storages[mark.storage.key]
    count = int(np.prod(mark.shape, dtype=object)) if mark.shape else 1
    last = sum((n - 1) * s for n, s in zip(mark.shape, mark.strides, strict=True))
    inside = mark.offset >= 0 and mark.offset + last < flat.size and count <= flat.size
    if min((*mark.shape, *mark.strides, 0)) < 0 or (count and not inside):
        raise _Refused(
            f"tensor {name} of shape {mark.shape} does not fit into its {flat.size} numbers."
        )
    if not count:
        return np.empty(mark.shape, flat.dtype)
    steps = [s * flat.itemsize for s in mark.strides]
    return np.lib.stride_tricks.as_strided(flat[mark.offset :], mark.shape, steps).copy()
