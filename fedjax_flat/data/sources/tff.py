"""The HDF5 files of TensorFlow Federated: examples/CLIENT/FIELD, an array with examples first."""

import itertools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from fedjax_flat import errors


def read(
    path: pathlib.Path, fields: Sequence[str], *, only: Sequence[str] | None = None, most: int = 0
) -> Iterator[tuple[str, list[Any]]]:
    """(client, its arrays of `fields`), in the order of names.

    Of those named in `only`, where the file has them; of the first `most` clients, 0 being all.
    """
    h5py = _library(path)
    try:
        file = h5py.File(path, "r")
    except OSError as e:
        raise errors.UsageError(
            f"{path}: {path.stat().st_size:,} bytes that are no whole HDF5 file ({e}). It is "
            "truncated or altered: delete it and download it again."
        ) from e
    with file:
        if "examples" not in file:
            raise errors.UsageError(
                f"{path}: has {', '.join(file) or 'nothing'}, but no group 'examples': expected "
                "TensorFlow Federated's examples/CLIENT/FIELD."
            )
        examples = file["examples"]
        names = examples if only is None else [name for name in only if name in examples]
        for client in itertools.islice(names, most or None):
            missing = [f for f in fields if f not in examples[client]]
            if missing:
                raise errors.UsageError(
                    f"{path}: client {client!r} has {', '.join(examples[client]) or 'nothing'}, "
                    f"but no {', '.join(missing)}."
                )
            yield client, [examples[client][f][()] for f in fields]


def _library(path: pathlib.Path) -> Any:
    try:
        import h5py
    except ImportError as e:
        raise errors.UsageError(
            f"{path} is an HDF5 file, and h5py, which reads it, is not installed: "
            "pip install 'fedjax-flat[hdf5]'."
        ) from e
    return h5py
