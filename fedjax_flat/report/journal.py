"""The steps of an eigenvalue solver on disk, so that one that was stopped goes on."""

import hashlib
import json
import os
import pathlib
import warnings
from typing import Any

import numpy as np

from fedjax_flat import curvature, disk
from fedjax_flat.disk import write_atomically


class Journal:
    """Written as the steps are made, read as the `start` of the next attempt.

    Vectors are appended to one file and their two numbers to another, after a first line that says
    what they are of: another computation of the same name starts anew. Each line ends with a
    checksum of the line before it, its vector and its numbers; where one does not hold, the steps
    from there on are made again.
    """

    def __init__(self, base: pathlib.Path, what: dict[str, Any], size: int, dtype: str):
        self.vectors = base.with_name(f".partial-{base.name}.vectors")
        self.numbers = base.with_name(f".partial-{base.name}.jsonl")
        self.row_bytes = size * np.dtype(dtype).itemsize
        self.checksum = _checksum(json.dumps(what))
        self.lines = [json.dumps([what, self.checksum])]
        self.start: curvature.Found | None = None
        if self.numbers.exists() and self.vectors.exists():
            self._read(size, dtype)

    def _read(self, size: int, dtype: str) -> None:
        first, *lines = self.numbers.read_bytes().split(b"\n")[:-1] or [b""]
        if first != self.lines[0].encode():
            if not _is_sound(first):
                warnings.warn(f"{self.numbers} is damaged: its steps are made again", stacklevel=4)
            return
        count = min(len(lines), self.vectors.stat().st_size // self.row_bytes)
        rows = np.fromfile(self.vectors, dtype, count * size).reshape(count, size)
        pairs: list[list[float]] = []
        for line, row in zip(lines[:count], rows, strict=True):
            numbers = _numbers(line)
            following = self._following(row, *numbers[:2]) if len(numbers) == 3 else None
            if following is None or numbers[2] != following:
                warnings.warn(
                    f"{self.numbers}: step {len(pairs) + 1} of {count} is damaged; it and what "
                    "follows are made again", stacklevel=4,
                )
                break
            self.checksum = following
            self.lines.append(line.decode())
            pairs.append(numbers[:2])
        if pairs:
            values = np.array(pairs)
            self.start = curvature.Found(rows[: len(pairs)], values[:, 0], values[:, 1])

    def _following(self, vector: np.ndarray, first: float, second: float) -> str:
        numbers = json.dumps([first, second])
        return _checksum(self.checksum, numbers, np.ascontiguousarray(vector).data)

    def append(self, vector: np.ndarray, first: float, second: float) -> None:
        """Adds one step."""
        if self.lines:  # the first since the start: cut off what was half-written or damaged
            write_atomically(self.numbers, "".join(f"{line}\n" for line in self.lines))
            with open(self.vectors, "ab", opener=disk.no_link) as file:
                os.truncate(file.fileno(), self.row_bytes * (len(self.lines) - 1))
            self.lines = []
        self.checksum = self._following(vector, first, second)
        with open(self.vectors, "ab", opener=disk.no_link) as file:
            file.write(np.ascontiguousarray(vector).data)
        with open(self.numbers, "a", opener=disk.no_link) as file:
            file.write(json.dumps([first, second, self.checksum]) + "\n")

    def delete(self) -> None:
        """Removes both files: the results are saved."""
        self.vectors.unlink(missing_ok=True)
        self.numbers.unlink(missing_ok=True)


def _checksum(*parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()[:32]


def _numbers(line: bytes) -> list[Any]:
    """[first, second, checksum], or less if it is none."""
    try:
        found = json.loads(line)
    except ValueError:
        return []
    kinds = [float, float, str]
    return found if isinstance(found, list) and [type(x) for x in found] == kinds else []


def _is_sound(first: bytes) -> bool:
    """Whether a first line is as it was written."""
    try:
        what, checksum = json.loads(first)
    except (ValueError, TypeError):
        return False
    return checksum == _checksum(json.dumps(what))
