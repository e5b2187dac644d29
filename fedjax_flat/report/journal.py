"""The steps of an eigenvalue solver on disk, so that one that was stopped goes on."""

import json
import os
import pathlib
from typing import Any

import numpy as np

from fedjax_flat import curvature
from fedjax_flat.disk import write_atomically


class Journal:
    """Written as the steps are made, read as the `start` of the next attempt.

    Vectors are appended to one file and their two numbers to another, after a first line that says
    what they are of: another computation of the same name starts anew.
    """

    def __init__(self, base: pathlib.Path, what: dict[str, Any], size: int, dtype: str):
        self.vectors = base.with_name(f".partial-{base.name}.vectors")
        self.numbers = base.with_name(f".partial-{base.name}.jsonl")
        self.lines = [json.dumps(what)]
        self.row_bytes = size * np.dtype(dtype).itemsize
        self.start: curvature.Found | None = None
        lines = self.numbers.read_text().split("\n")[:-1] if self.numbers.exists() else []
        if lines[1:] and lines[0] == self.lines[0] and self.vectors.exists():
            count = min(len(lines) - 1, self.vectors.stat().st_size // self.row_bytes)
            self.lines = lines[: count + 1]
            rows = np.fromfile(self.vectors, dtype, count * size).reshape(count, size)
            pairs = np.array([json.loads(line) for line in self.lines[1:]]).reshape(-1, 2)
            self.start = curvature.Found(rows, pairs[:, 0], pairs[:, 1])

    def append(self, vector: np.ndarray, first: float, second: float) -> None:
        """Adds one step."""
        if self.lines:  # the first since the start: cut off what was half-written then
            self.numbers.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.numbers, "".join(f"{line}\n" for line in self.lines))
            self.vectors.touch()
            os.truncate(self.vectors, self.row_bytes * (len(self.lines) - 1))
            self.lines = []
        with open(self.vectors, "ab") as file:
            file.write(np.ascontiguousarray(vector).data)
        with open(self.numbers, "a") as file:
            file.write(json.dumps([first, second]) + "\n")

    def delete(self) -> None:
        """Removes both files: the results are saved."""
        self.vectors.unlink(missing_ok=True)
        self.numbers.unlink(missing_ok=True)
