"""Results of an analysis: `NAME.npz` for the arrays, `NAME.json` for what they are of, to read.

The .npz has the description too, with a checksum of everything: what was stopped goes on from a
file only if the file is of the same computation and as it was written.
"""

import hashlib
import json
import os
import pathlib
import warnings
from typing import Any

import numpy as np

from fedjax_flat import disk

LONGEST = 200  # bytes of a name, to which endings are added


def named(folder: pathlib.Path, name: str) -> pathlib.Path:
    """The path of results, without an ending; a name that is too long becomes a part and a hash."""
    if len(os.fsencode(name)) <= LONGEST:
        return folder / name
    short = os.fsencode(name)[: LONGEST - 17].decode(errors="ignore")
    return folder / f"{short}_{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}"


def digest(what: Any) -> str:
    """Eight letters that tell computations of one name apart."""
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:8]


def suffixed(base: pathlib.Path, suffix: str) -> pathlib.Path:
    """base + suffix, whatever dots there are in base."""
    return base.with_name(base.name + suffix)


def locked(base: pathlib.Path):
    """Keeps two processes from computing the same results."""
    base.parent.mkdir(parents=True, exist_ok=True)
    return disk.locked(
        base.with_name(f".lock-{base.name}"),
        f"another process is computing {base} at this moment. Wait for it, or stop it.",
    )


def save(base: pathlib.Path, arrays: dict[str, Any], what: dict[str, Any]) -> None:
    """Writes both files, each whole or not at all."""
    about = json.dumps([what, _digest(arrays, what)])
    with disk.whole(suffixed(base, ".npz")) as partial:
        np.savez(partial, about=np.array(about), **arrays)
    _write_to_read(base, what)


def load(base: pathlib.Path, what: dict[str, Any]) -> dict[str, np.ndarray] | None:
    """The arrays of this computation, if they are there and sound."""
    found = read(suffixed(base, ".npz"), otherwise="computed again")
    if not found or found[0] != what:
        return None
    _write_to_read(base, what)  # it may have been damaged or lost
    return found[1]


def _write_to_read(base: pathlib.Path, what: dict[str, Any]) -> None:
    disk.write_atomically(suffixed(base, ".json"), json.dumps(what, indent=2) + "\n")


def read(
    path: pathlib.Path, *, otherwise: str = "left out"
) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """(what it is of, arrays) of a file, if it is there and sound."""
    if not path.is_file():
        return None
    try:
        arrays = disk.read_npz(path)
        saved, checksum = json.loads(str(arrays.pop("about")))
        sound = checksum == _digest(arrays, saved)
    except (OSError, ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        warnings.warn(f"{path} is damaged or of an earlier version: {otherwise}", stacklevel=3)
        return None
    return saved, arrays


def _digest(arrays: dict[str, Any], what: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode())
    for name in sorted(arrays):
        value = np.asarray(arrays[name])
        digest.update(f"{name} {value.dtype} {value.shape};".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()
