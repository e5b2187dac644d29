"""The JSON files of LEAF (Caldas et al., "LEAF: a benchmark for federated settings", 2018).

DATA/train/*.json and DATA/test/*.json, each {"users": [...], "num_samples": [...],
"user_data": {user: {"x": [...], "y": [...]}}}. LEAF's own split gives every user a train and a test
part; its split by user (`-t user`) tests on users that never train.
"""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

from fedjax_flat import errors


def read(folder: pathlib.Path) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """(user, x, y) of every user of a split's files, one file in memory at a time."""
    paths = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not paths:
        raise errors.UsageError(
            f"{folder} has no .json file: expected LEAF's train/*.json and test/*.json, as its "
            "preprocess.sh writes them."
        )
    seen: dict[str, pathlib.Path] = {}
    for path in paths:
        content = _content(path)
        for user, samples in zip(content["users"], content["num_samples"], strict=True):
            if user in seen:
                raise errors.UsageError(
                    f"{path}: user {user!r} is in {seen[user].name} already: expected every user "
                    "once. Files of two runs of preprocess.sh may lie together."
                )
            seen[user] = path
            part = content["user_data"].get(user, {})
            x, y = part.get("x", []), part.get("y", [])
            if not len(x) == len(y) == samples:
                raise errors.UsageError(
                    f"{path}: user {user!r} has {len(x)} x and {len(y)} y, but num_samples says "
                    f"{samples}. Run LEAF's preprocess.sh again."
                )
            yield user, x, y


def _content(path: pathlib.Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except ValueError as e:
        raise errors.UsageError(
            f"{path}: {path.stat().st_size:,} bytes that are no JSON ({e}). The file is truncated: "
            "run LEAF's preprocess.sh again."
        ) from e
    keys = ("users", "num_samples", "user_data")
    missing = [k for k in keys if not isinstance(content, dict) or k not in content]
    if missing or len(content["users"]) != len(content["num_samples"]):
        raise errors.UsageError(
            f"{path}: no LEAF file, it lacks {', '.join(missing) or 'num_samples of some users'}. "
            f"Expected an object with {', '.join(keys)}."
        )
    return content
