"""Splits that were released with FedSAM and FedGloSS, read from one file."""

import os
import zipfile

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.partition.base import PARTITIONS, Partition
from fedjax_flat.data.sources import DATA_VARIABLE, Dataset
from fedjax_flat.registry import entry
from fedjax_flat.settings import Setting


def released(path: str | os.PathLike, name: str) -> Partition:
    """One of the splits released with FedSAM and FedGloSS, e.g. `cifar10_alpha_0.05`.

    The file holds `NAME_idx` and `NAME_off`. Known quirk: in CIFAR-10's, train image 10100 belongs
    to no client.
    """
    try:
        with open(path, "rb") as f, np.load(f, allow_pickle=False) as z:
            names = {key.removesuffix("_off"): key for key in z.files if key.endswith("_off")}
            key = errors.lookup("released split", name, names)
            offsets = z[key].astype(np.int64)
            return Partition(z[f"{name}_idx"].astype(np.int32), offsets)
    except (OSError, zipfile.BadZipFile) as e:
        raise errors.UsageError(
            f"cannot read released splits from {path} ({e}). Expected fedsam-splits.npz; name it "
            "with --config.partition.file."
        ) from e


def _released(dataset: Dataset, data_dir, *, file, split) -> Partition:
    """A split that was released with FedSAM and FedGloSS."""
    del dataset
    folder = data_dir or os.environ.get(DATA_VARIABLE, ".")
    return released(file or os.path.join(folder, "fedsam-splits.npz"), split)


PARTITIONS.add("released", entry(_released, {
    "file": Setting("", "path of fedsam-splits.npz; else it is in the data folder"),
    "split": Setting("", "e.g. cifar10_alpha_0.05"),
}))
