"""A trained model as a file of arrays, which other programs read and `--init FILE` takes.

Names are those of parts.py, `params/Conv_0/kernel`, `stats/batch_stats/...`; a .msgpack file has
flax's nested dicts, so that `flax.serialization.msgpack_restore` returns what `module.apply` takes.
Bits stay as they are. models/weights.py reads all three forms back and executes nothing.
"""

import io
import os
import pathlib
from collections.abc import Callable

import flax
import numpy as np

from fedjax_flat import disk, errors, parts
from fedjax_flat.run.restore import load_run

Arrays = dict[str, np.ndarray]


def export(
    run: str | os.PathLike,
    form: str = "",
    out: str | os.PathLike | None = None,
    *,
    model: str = "global",
    round: int | None = None,
    data_dir: str | os.PathLike | None = None,
) -> pathlib.Path:
    """Writes a model of a run, of its newest checkpoint or of `round`'s; returns the file.

    Without a `form` the suffix of `out` says it; without `out` the file is in the run folder.
    """
    form = form or (pathlib.Path(out).suffix[1:] if out else "safetensors")
    write = errors.lookup("form", form, FORMS)
    trained = load_run(run, data_dir, round=round)
    arrays = {n: np.asarray(a) for n, a in
              parts.take(trained.model(model), lambda name: True).items()}
    odd = next((n for n, a in arrays.items() if a.dtype.isbuiltin != 1), None)
    if odd and form == "npz":
        raise errors.UsageError(
            f"{odd} is {arrays[odd].dtype}, which .npz files have no name for: expected --to "
            "safetensors or msgpack."
        )
    name = f"{model}_round{int(trained.state.round)}.{form}"
    path = pathlib.Path(out) if out else trained.folder.path / "export" / name
    disk.write_atomically(path, write(arrays))
    return path


def _safetensors(arrays: Arrays) -> bytes:
    try:
        import safetensors.numpy
    except ImportError as e:
        raise errors.UsageError(
            "safetensors is missing: pip install 'fedjax-flat[pretrained]', or --to npz."
        ) from e
    return safetensors.numpy.save({n: np.ascontiguousarray(a) for n, a in arrays.items()})


def _msgpack(arrays: Arrays) -> bytes:
    return flax.serialization.msgpack_serialize(
        flax.traverse_util.unflatten_dict(arrays, sep="/")
    )


def _npz(arrays: Arrays) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


FORMS: dict[str, Callable[[Arrays], bytes]] = {
    "safetensors": _safetensors, "msgpack": _msgpack, "npz": _npz,
}
