"""Splits that were released with FedSAM and FedGloSS, read from one file."""

import os

import numpy as np

from fedjax_flat import disk, errors
from fedjax_flat.data.partition.base import PARTITIONS, Partition, checked_offsets
from fedjax_flat.data.sources import DATA_VARIABLE, Dataset
from fedjax_flat.registry import entry
from fedjax_flat.settings import Setting


def released(path: str | os.PathLike, name: str) -> Partition:
    """One of the splits released with FedSAM and FedGloSS, e.g. `cifar10_alpha_0.05`.

    The file holds `NAME_idx` and `NAME_off`. Known quirk: in CIFAR-10's, train image 10100 belongs
    to no client.
    """
    try:
        found = disk.read_npz(path)
    except (OSError, ValueError) as e:
        raise errors.UsageError(
            f"cannot read released splits from {path} ({e}). Expected fedsam-splits.npz; name it "
            "with --config.partition.file."
        ) from e
    names = {key.removesuffix("_off"): key for key in found if key.endswith("_off")}
    offsets = found[errors.lookup("released split", name, names)]
    indices = found.get(f"{name}_idx")
    if indices is None:
        raise errors.UsageError(f"{path} has {name}_off but no {name}_idx: expected both.")
    for key, array in ((f"{name}_off", offsets), (f"{name}_idx", indices)):
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise errors.UsageError(
                f"{path}: {key} is {array.dtype} of shape {array.shape}; expected a row of whole "
                "numbers."
            )
    try:
        return Partition.of(np.split(indices, checked_offsets(offsets, len(indices))[1:-1]))
    except errors.UsageError as e:
        raise errors.UsageError(f"{path}, split {name}: {e}") from e


def _released(dataset: Dataset, data_dir, *, file, split) -> Partition:
    """A split that was released with FedSAM and FedGloSS."""
    del dataset
    folder = data_dir or os.environ.get(DATA_VARIABLE, ".")
    return released(file or os.path.join(folder, "fedsam-splits.npz"), split)


PARTITIONS.add("released", entry(_released, {
    "file": Setting("", "path of fedsam-splits.npz; else it is in the data folder"),
    "split": Setting("", "e.g. cifar10_alpha_0.05"),
}))
