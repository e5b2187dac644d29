"""What is known of a sweep's cells, as files: a driver that was killed begins where it was.

    FOLDER/sweep.json            the cells and their configs; later drivers must ask the same
    FOLDER/cells/NAME/           run folders
    FOLDER/book/NAME.json        how a cell ended: finished, stopped (with the round) or failed
    FOLDER/book/NAME.log         what it printed
    FOLDER/book/NAME.stop        asks its worker to stop

A cell without an entry was never finished, whoever ran it: it is run again, and goes on from its
last checkpoint.
"""

import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from fedjax_flat import disk, errors
from fedjax_flat.experiment import config as config_lib
from fedjax_flat.run import metrics
from fedjax_flat.sweep.plan import Cell

ENDED = ("finished", "stopped")


class Book:
    """The files of one sweep."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder

    def in_use(self):
        """Holds the sweep for one driver."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return disk.locked(
            self.folder / ".lock",
            f"{self.folder} is in use by another sweep: wait for it, or choose another folder with "
            "--run.",
        )

    def write_plan(self, cells: Sequence[Cell], choose_by: str) -> None:
        """Keeps the cells; refuses a cell that was there and is another now."""
        path = self.folder / "sweep.json"
        known = self.plan()["cells"] if path.exists() else {}
        asked = {
            c.name: {"row": c.row, "tuned": dict(c.tuned), "seed": c.seed,
                     "config": json.loads(config_lib.to_json(c.config))}
            for c in cells
        }
        for name, cell in json.loads(json.dumps(asked)).items():
            if name in known and known[name]["config"] != cell["config"]:
                old, new = (config_lib.from_json(json.dumps(x["config"]))
                            for x in (known[name], cell))
                differs = config_lib.differences(old, new)
                if differs:
                    raise errors.UsageError(
                        f"cell {name} of {self.folder} was planned otherwise: "
                        f"{'; '.join(differs)}. Put the sweep back, rename the row, or choose "
                        "another folder with --run."
                    )
        text = json.dumps({"choose_by": choose_by, "cells": {**known, **asked}}, indent=1)
        disk.write_atomically(path, text + "\n")

    def plan(self) -> dict[str, Any]:
        """What `write_plan` kept."""
        path = self.folder / "sweep.json"
        if not path.is_file():
            raise errors.UsageError(
                f"{self.folder} holds no sweep: fedjax-flat sweep FILE --run {self.folder} makes "
                "one."
            )
        try:
            found = disk.read_json(path)
            if isinstance(found["cells"], dict) and "choose_by" in found:
                return found
            why: object = "it has no cells"
        except (OSError, ValueError, LookupError, TypeError) as e:
            why = e
        raise errors.UsageError(
            f"{path} cannot be read as the plan of a sweep ({why}). Delete that file and give the "
            "sweep again: what has ended is not run again."
        )

    def run_folder(self, name: str) -> pathlib.Path:
        """Of a cell."""
        return self.folder / "cells" / name

    def path(self, name: str, suffix: str) -> pathlib.Path:
        """Of a cell's entry, log or request to stop."""
        path = self.folder / "book" / f"{name}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def entry(self, name: str) -> dict[str, Any]:
        """How a cell ended last; {} if it has not, or its entry was cut short."""
        try:
            found = json.loads(self.path(name, "json").read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def write_entry(self, name: str, state: str, **facts: Any) -> None:
        """Says how a cell ended."""
        text = json.dumps({"state": state, **facts}) + "\n"
        disk.write_atomically(self.path(name, "json"), text)

    def last_lines(self, name: str, count: int = 3) -> list[str]:
        """Of what a cell printed, without its progress."""
        try:
            text = self.path(name, "log").read_text(errors="replace")
        except FileNotFoundError:
            return []
        lines = [line.rpartition("\r")[2].strip() for line in text.splitlines()]
        progress = re.compile(r"\d+ of \d+ rounds, ")
        said = [line for line in lines if line and not progress.search(line)]
        return [errors.printable(line) for line in said[-count:]]

    def scores(self, name: str, split: str) -> list[tuple[int, float]]:
        """(round, score) of a cell's global model on a split, so far; nothing of round 0."""
        path = self.run_folder(name) / "metrics.jsonl"
        if not path.exists():
            return []
        records = metrics.read(path)
        key = metrics.score_name(records) if records else "accuracy"
        return [(r["round"], r[key]) for r in records
                if r["split"] == split and r.get("model") == "global" and r["round"] > 0
                and key in r]
