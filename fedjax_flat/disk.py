"""Files on a disk that may be full, shared or tampered with.

What is written is there whole or not at all: it is written beside its place, under a name that
nobody can foresee, and moved there once it is on the disk. Where a name can be foreseen, a symbolic
link of that name is not followed. A lock is let go by itself when its process dies.
"""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import re
import shutil
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from fedjax_flat import errors

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


def folder(what: str, path: str | os.PathLike) -> pathlib.Path:
    """A path of this machine; refuses gs:// and the like, which have no locks and no renaming."""
    text = os.fspath(path)
    scheme, found, _ = text.partition("://")
    if found and scheme.isalnum():
        raise errors.UsageError(
            f"{what} {text}: expected a folder of this machine; {scheme}:// has no locks and no "
            "renaming. Mount the bucket and give the folder where it is (docs/launch.md)."
        )
    return pathlib.Path(path)


@contextlib.contextmanager
def whole(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """A path to write to, which becomes `path` when all is written, and vanishes if not."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial-{os.urandom(8).hex()}{path.suffix}")
    try:
        yield partial
        file = os.open(partial, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_atomically(path: str | os.PathLike, content: str | bytes) -> None:
    """The file has the old content or the new one, never a part."""
    with whole(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def no_link(path: str, flags: int) -> int:
    """As `opener` of `open`: refuses a symbolic link, which would lead elsewhere."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as e:
        if e.errno != errno.ELOOP:
            raise
        raise errors.UsageError(
            f"{path} is a symbolic link, which is not followed: it could lead anywhere. Delete it."
        ) from e


@contextlib.contextmanager
def locked(path: pathlib.Path, busy: str) -> Iterator[None]:
    """Holds lock file `path`; `busy` is what to say while another process does."""
    with open(path, "a", opener=no_link) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise errors.UsageError(busy) from None
        except OSError as e:
            if e.errno not in _NO_LOCKS:
                raise
            warnings.warn(
                f"{path} cannot be locked on this file system ({e.strerror}): see to it that no "
                "other process works there", stacklevel=4,
            )
        yield


def read_npz(path: str | os.PathLike) -> dict[str, Any]:
    """The arrays of an .npz file; a ValueError if it is damaged or has more than plain arrays."""
    import numpy as np  # the command line, which is quick, needs the rest of this module only

    with open(path, "rb") as file:
        try:
            with np.load(file, allow_pickle=False) as content:
                return {name: content[name] for name in content.files}
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, LookupError, OSError,
                AttributeError, TypeError, MemoryError) as e:  # as seen of files with a wrong byte
            raise ValueError(f"{type(e).__name__}: {e}") from e


def read_json(path: str | os.PathLike) -> Any:
    """What a JSON file says; a ValueError if it is damaged, however deep."""
    with open(path, "rb") as file:
        try:
            return json.loads(file.read())
        except RecursionError:
            raise ValueError("brackets beyond all depth") from None


def told(path: pathlib.Path, names: Iterable[str]) -> dict[str, Any] | None:
    """The entries of a small JSON file that informs; nothing, with a warning, if it is damaged."""
    try:
        found = read_json(path)
        return {name: found[name] for name in names}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as e:
        warnings.warn(f"{path} cannot be read ({e}) and is done without", stacklevel=3)
        return None


def set_aside(path: pathlib.Path, why: str) -> None:
    """Keeps a copy of a damaged file, which is about to be written anew, and says so."""
    kept = path.with_name(f"{path.name}.damaged")
    with contextlib.suppress(FileNotFoundError), whole(kept) as partial:
        shutil.copyfile(path, partial)
        why += f"; as it was it is {kept.name}"
    warnings.warn(f"{path}: {why}", stacklevel=4)


def refusal(error: Exception, folder: str | os.PathLike = "") -> str | None:
    """What the disk said, 'No space left on device', if it was the disk that refused to write.

    Tensorstore wraps what the system said in words of its own. In `folder` and above it any refusal
    counts, because there it must be possible to write.
    """
    if isinstance(error, OSError):
        where = os.path.abspath(os.fsdecode(error.filename)) if error.filename else None
        home = os.path.abspath(folder) if folder else None
        ours = where and home and (where.startswith(home) or home.startswith(where))
        number = error.errno if ours or error.errno in (*FULL, errno.EROFS) else None
    else:
        found = re.search(r"os_error_code='(\d+)'", str(error))
        number = int(found[1]) if found else None
    return os.strerror(number) if number else None
