"""What a server has with labels where clients have none: all examples of one natural client.

`data.labelled` names it, a drive or a city; clients are made of all others (algorithms/ladd.py). A
share, 0.1, is of examples that are drawn, for data without natural clients.
"""

import dataclasses

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.sources import Dataset, count_of


def labelled(dataset: Dataset, name: str) -> np.ndarray:
    """Positions of the train examples of the natural client of this name, or of a share of all."""
    names = {client: i for i, client in enumerate(dataset.clients)}
    if name not in names and (share := _share(name)) is not None:
        count = count_of(dataset.train)
        size = int(share * count) if 0 < share < 1 else 0
        if not 0 < size < count:
            raise errors.UsageError(
                f"data.labelled = {name!r}: no natural client of {dataset.name}, nor a share of "
                f"its {count} train examples that leaves some to clients. Expected one, e.g. 0.1."
            )
        return np.sort(np.random.default_rng(0).permutation(count)[:size])
    if dataset.owners is None or not names:
        raise errors.UsageError(
            f"data.labelled = {name!r}: {dataset.name} has no natural clients with names. Expected "
            "data that have, e.g. camvid, and the name of one; or a share of the train examples, "
            "e.g. 0.1."
        )
    number = errors.lookup(f"natural client of {dataset.name}", name, names)
    return np.flatnonzero(dataset.owners == number)


def _share(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def with_target(dataset: Dataset, name: str) -> Dataset:
    """With a split `target`, the test examples of all other natural clients; `none` has none."""
    if name not in dataset.clients or dataset.test_owners is None:
        return dataset
    where = np.flatnonzero(dataset.test_owners != dataset.clients.index(name))
    return dataclasses.replace(dataset, parts={**dataset.parts, "target": where})
