"""Files that people put into the data folder: found, verified, and caches written whole."""

import contextlib
import errno
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.sources.base import DATA_VARIABLE

CACHE_VARIABLE = "FEDJAX_FLAT_CACHE"


def find(folder: pathlib.Path | None, names: Sequence[str]) -> pathlib.Path | None:
    """The first of `names` that is there."""
    if folder is None:
        return None
    return next((folder / n for n in names if (folder / n).exists()), None)


def is_here(*names: str) -> Callable[[pathlib.Path | None], bool]:
    """Whether one of these is in a folder."""
    return lambda folder: find(folder, names) is not None


def need(dataset: str, folder: pathlib.Path | None, names: Sequence[str]) -> pathlib.Path:
    """The first of `names` that is there, or an error that says what to put where."""
    found = find(folder, names)
    if found is None:
        given = f"{folder} has no" if folder else "no data folder was given; it must hold"
        raise errors.UsageError(
            f"{dataset}: {given} {' or '.join(names)}. Put it there, or name another folder with "
            f"--data or {DATA_VARIABLE}; `fedjax-flat datasets` says what every data set needs."
        )
    return found


def located(
    dataset: str, folder: pathlib.Path | None, path: str, expected: str
) -> pathlib.Path:
    """What `path` names inside the data folder, or else by itself; an error if neither is there."""
    tried = [p for p in (folder and folder / path, pathlib.Path(path).expanduser()) if p]
    found = next((p for p in tried if p.exists()), None)
    if found is None:
        missing = " and no ".join(dict.fromkeys(map(str, tried)))
        raise errors.UsageError(
            f"{dataset}: no {missing}. Expected {expected}; "
            f"give a path inside the data folder (--data or {DATA_VARIABLE}), or a whole one."
        )
    return found


def cache_folder(beside: pathlib.Path) -> pathlib.Path:
    """Where decoded copies are kept: in FEDJAX_FLAT_CACHE, or in a hidden folder of the data."""
    given = os.environ.get(CACHE_VARIABLE)
    return pathlib.Path(given) if given else beside / ".fedjax_flat_cache"


def fingerprint(root: pathlib.Path, paths: Sequence[pathlib.Path], *how: Any) -> str:
    """Names an outcome of these files, in this order, as they are now: names, sizes and times."""
    digest = hashlib.sha256(repr(how).encode())
    for path in paths:
        state = path.stat()
        facts = (os.path.relpath(path, root), state.st_size, state.st_mtime_ns)
        digest.update(repr(facts).encode())
    return digest.hexdigest()[:24]


def check_md5(path: str | os.PathLike, content: bytes, expected: str) -> None:
    """Refuses a file that is not the original."""
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != expected:
        raise errors.UsageError(
            f"{path}: md5 {found}, but the original has {expected} ({len(content):,} bytes here). "
            "The file is truncated or altered: delete it and download it again."
        )


@contextlib.contextmanager
def written_whole(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A path to write to, which becomes `path` when all is written, and vanishes if not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        raise errors.UsageError(
            f"cannot write {path} ({e.strerror}): nothing was left there. Free some space, or name "
            f"a data folder on another disk with --data or {DATA_VARIABLE}, or one for caches with "
            f"{CACHE_VARIABLE}."
        ) from e
    finally:
        partial.unlink(missing_ok=True)


def memory_mapped(path: pathlib.Path, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array of an `.npy` file that stays on disk until it is read."""
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if array.shape != shape or array.dtype != dtype:
        raise errors.UsageError(
            f"{path} holds {array.dtype} of shape {array.shape}: expected {np.dtype(dtype)} of "
            f"shape {shape}. Delete it, and it is made again."
        )
    return array
