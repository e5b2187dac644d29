"""What a server has with labels where clients have none: all examples of one natural client.

`data.labelled` names it, a drive or a city; clients are made of all others (algorithms/ladd.py).
"""

import dataclasses

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.sources import Dataset


def labelled(dataset: Dataset, name: str) -> np.ndarray:
    """Positions of the train examples of the natural client of this name."""
    names = {client: i for i, client in enumerate(dataset.clients)}
    if dataset.owners is None or not names:
        raise errors.UsageError(
            f"data.labelled = {name!r}: {dataset.name} has no natural clients with names. Expected "
            "data that have, e.g. camvid, and the name of one."
        )
    number = errors.lookup(f"natural client of {dataset.name}", name, names)
    return np.flatnonzero(dataset.owners == number)


def with_target(dataset: Dataset, name: str) -> Dataset:
    """With a split `target`, the test examples of all other natural clients; `none` has none."""
    if name not in dataset.clients or dataset.test_owners is None:
        return dataset
    where = np.flatnonzero(dataset.test_owners != dataset.clients.index(name))
    return dataclasses.replace(dataset, parts={**dataset.parts, "target": where})
