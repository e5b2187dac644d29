"""Checkpoints of the whole state; orbax behind `save` and `restore`.

Orbax makes a checkpoint appear atomically. Each carries a SHA-256 of its arrays, which `restore`
compares: a checkpoint that cannot be read or does not match is passed over, with a warning, for
the one before it. One of another config or model is not damaged: what differs is said. Nothing in a
checkpoint is unpickled.
"""

import hashlib
import logging
import os
import pathlib
import shutil
import warnings
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from fedjax_flat import disk, errors

# orbax reports every file it writes, and what it raises as well
logging.getLogger("absl").setLevel(logging.CRITICAL)
# What orbax and tensorstore raise for files that are cut, garbled or gone.
_DAMAGE = (ValueError, OSError, LookupError, TypeError, AttributeError)


class _OtherStateError(ValueError):
    """A sound checkpoint of something else; the message names what differs."""


class Checkpoints:
    """The newest `keep` checkpoints in `folder`, numbered by round."""

    def __init__(self, folder: str | os.PathLike, keep: int = 2):
        self._folder = pathlib.Path(folder).absolute()
        self._damaged: set[int] = set()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._manager = ocp.CheckpointManager(
            self._folder,
            item_handlers={
                "state": ocp.StandardCheckpointHandler(), "check": ocp.JsonCheckpointHandler()
            },
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                enable_async_checkpointing=False,
                create=False,
                multiprocessing_options=_alone(),
            ),
        )

    @property
    def rounds(self) -> list[int]:
        """Rounds with a checkpoint, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, round: int, state: Any) -> None:
        """Writes `state`; returns when it is safely on disk."""
        if round in self._damaged:
            self._manager.delete(round)
            self._damaged.remove(round)
        if round in self.rounds:
            return
        arrays = jax.tree.map(np.asarray, without_keys(state))
        try:
            self._manager.save(
                round,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(arrays),
                    check=ocp.args.JsonSave({"sha256": _digest(arrays)}),
                ),
                force=True,
            )
        except (OSError, ValueError) as e:
            if disk.refusal(e):
                self.discard_unfinished()
            raise

    def discard_unfinished(self) -> None:
        """Removes what a process that was stopped, or a full disk, left half-written."""
        for partial in self._folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(partial, ignore_errors=True)

    def require(self, round: int) -> None:
        """Refuses a round without a checkpoint, and says which there are."""
        if round not in self.rounds:
            kept = ", ".join(map(str, self.rounds)) or "none"
            raise errors.UsageError(
                f"{self._folder} has no checkpoint of round {round}; it has {kept}. More are kept "
                "with --config.checkpoint.keep."
            )

    def restore(self, like: Any, round: int | None = None) -> tuple[int, Any] | None:
        """(round, state) of the newest sound checkpoint, or of `round`; None when there is none."""
        newest_first = self.rounds[::-1]
        if round is not None:
            self.require(round)
            newest_first = [round]
        other = []
        for round in newest_first:
            try:
                state = self._read(round, like)
            except _OtherStateError as e:
                other.append(
                    f"the checkpoint of round {round} in {self._folder} is of another config or "
                    f"model: {e}"
                )
            except _DAMAGE as e:
                reason = str(e).strip().splitlines() or [type(e).__name__]
                warnings.warn(
                    f"checkpoint of round {round} is damaged and passed over ({reason[0][:120]})",
                    stacklevel=2,
                )
            else:
                for text in other:
                    warnings.warn(f"{text}; it is passed over", stacklevel=2)
                return round, state
            self._damaged.add(round)
        if other:
            raise errors.UsageError(
                f"{other[0]}. Nothing was changed. Go on with what it was trained with, or train "
                "in another folder with --run."
            )
        if newest_first:
            raise errors.UsageError(
                f"no checkpoint in {self._folder} can be read: all are damaged. Train in another "
                "folder, and keep this one if a copy of its checkpoints may still be found."
            )
        return None

    def _read(self, round: int, like: Any) -> Any:
        shapes = jax.eval_shape(without_keys, like)
        differences = _differences(self._manager.item_metadata(round)["state"].tree, shapes)
        if differences:
            more = f"; and {len(differences) - 4} more" if len(differences) > 4 else ""
            raise _OtherStateError("; ".join(differences[:4]) + more)
        read = self._manager.restore(
            round,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(shapes), check=ocp.args.JsonRestore()
            ),
        )
        if _digest(read.state) != read.check["sha256"]:
            raise ValueError("the arrays differ from the digest saved with them")
        return with_keys(read.state, like)

    def digest(self, round: int) -> str:
        """The SHA-256 that was saved with the arrays of a checkpoint."""
        read = self._manager.restore(round, args=ocp.args.Composite(check=ocp.args.JsonRestore()))
        return read.check["sha256"]

    def close(self) -> None:
        """Releases orbax's threads."""
        self._manager.close()


def _alone() -> ocp.options.MultiprocessingOptions:
    """Checkpoints belong to the one process that opens them; the others do not wait for it."""
    if jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    me = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process_{me}"
    )


def changed(a: Any, b: Any) -> list[str]:
    """The leaves of two states of the same shape whose bits differ, and by how much at most."""
    found = []
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(without_keys(a)),
                            jax.tree.leaves(without_keys(b)), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        if x.tobytes() != y.tobytes():
            most = np.abs(x.astype(np.float64) - y.astype(np.float64)).max()
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            found.append(f"{name} by up to {most:.3g}")
    return found


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def without_keys(state: Any) -> Any:
    """Random keys as the numbers they are made of."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, state)


def with_keys(arrays: Any, like: Any) -> Any:
    """Undoes `without_keys`; what is in host memory in `like` goes there."""

    def place(x, y):
        if _is_key(y):
            return jax.random.wrap_key_data(x)
        kept_on_host = getattr(y.sharding, "memory_kind", None) == "pinned_host"
        return jax.device_put(x, y.sharding if kept_on_host else None)

    return jax.tree.map(place, arrays, like)


def _differences(saved: Any, expected: Any) -> list[str]:
    """Leaves that are not there, not wanted or of another shape or type."""

    def leaves(tree):
        named = jax.tree_util.tree_leaves_with_path(tree)
        return {
            jax.tree_util.keystr(path, simple=True, separator="/"): f"{x.dtype}{list(x.shape)}"
            for path, x in named
        }

    a, b = leaves(saved), leaves(expected)
    return [
        f"{name} is {a.get(name, 'not there')}, expected {b.get(name, 'nothing of that name')}"
        for name in sorted({*a, *b})
        if a.get(name) != b.get(name)
    ]


def _digest(arrays: Any) -> str:
    digest = hashlib.sha256()
    for path, x in jax.tree_util.tree_leaves_with_path(arrays):
        value = np.asarray(x)
        digest.update(f"{jax.tree_util.keystr(path)} {value.dtype} {value.shape};".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()
