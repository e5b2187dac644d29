"""Pictures of known places: train cities to learn from, and a database and queries to test.

Retrieval reads labels in one of two ways. Whole numbers are identities: two examples of one number
belong together. Pairs of numbers are positions in metres: near examples belong together, far ones
do not (`task.radius`, `task.negative_radius`). Test examples are of the part `database` or of the
part `queries`. A natural client is a sequence of pictures; the name of its city stands before the
first slash of its own, `zurich/a1b2`, so that clients can be grouped by city.

Only distances within a city mean anything. Cities lie side by side on a made-up map, far enough
apart, and start at zero, so that 32-bit numbers keep centimetres (UTM northings, some millions,
would be rounded to half metres).
"""

from typing import NamedTuple

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.sources.base import Dataset, Examples, count_of, numbered

APART = 10_000.0  # metres between cities
PARTS = ("database", "queries")


class Views(NamedTuple):
    """Where pictures were taken: arrays with one entry for each picture."""

    city: np.ndarray  # names
    sequence: np.ndarray  # names, within a city
    query: np.ndarray  # True: a query; False: of the database
    position: np.ndarray  # (N, 2), metres, float64


def dataset(
    name: str, train: tuple[np.ndarray, Views], test: tuple[np.ndarray, Views], *,
    max_value: float, mean: tuple[float, ...], std: tuple[float, ...],
) -> Dataset:
    """Images with their views: train ones are owned by sequences, test ones by nobody."""
    (images, views), (tested, seen) = train, test
    positions = placed(
        np.concatenate([views.position, seen.position]), np.concatenate([views.city, seen.city])
    )
    names, owners = numbered([f"{c}/{s}" for c, s in zip(views.city, views.sequence, strict=True)])
    count = len(views.city)
    found = Dataset(
        name, Examples(images, positions[:count]), Examples(tested, positions[count:]), 0,
        max_value, mean, std, "retrieval", owners, None, names,
        parts=parts_of(seen.query), queries=np.asarray(views.query, bool),
    )
    check_places(found)
    return found


def parts_of(query: np.ndarray) -> dict[str, np.ndarray]:
    """The parts of test examples, by which of them are queries."""
    return {"database": np.flatnonzero(~query), "queries": np.flatnonzero(query)}


def placed(position: np.ndarray, city: np.ndarray) -> np.ndarray:
    """Positions on the made-up map, float32: cities by name, from left to right."""
    position = np.asarray(position, np.float64)
    out, left = np.zeros(position.shape, np.float32), 0.0
    for name in np.unique(city):
        own = city == name
        corner = position[own].min(0)
        out[own] = position[own] - corner + (left, 0.0)
        left += float(np.ptp(position[own][:, 0])) + APART
    return out


def check_places(dataset: Dataset) -> None:
    """Refuses what retrieval cannot read: labels of neither kind, an empty database, no queries."""
    kinds = set()
    for split in ("train", "test"):
        examples = dataset.split(split)
        labels, count = examples.labels, count_of(examples)
        shape, kind = np.shape(labels), np.asarray(labels).dtype.kind
        if shape == (count, 2) and kind == "f":
            kinds.add("positions")
            wrong = ~np.isfinite(labels).all(1)
            if wrong.any():
                i = int(np.argmax(wrong))
                raise errors.UsageError(
                    f"{dataset.name}: position {np.asarray(labels)[i].tolist()} of {split} example "
                    f"{i}: expected two finite numbers, in metres ({int(wrong.sum())} such labels)."
                )
        elif shape == (count,) and kind in "iu":
            kinds.add("identities")
        else:
            raise errors.UsageError(
                f"{dataset.name}: {split} labels of shape {shape} and type "
                f"{np.asarray(labels).dtype}: retrieval expects a whole number per example (who or "
                "what it shows), or two floats (where it was taken, in metres)."
            )
    if len(kinds) > 1:
        raise errors.UsageError(
            f"{dataset.name}: of train and test labels one are identities, the other positions: "
            "expected the same of both."
        )
    for part in PARTS:
        where = dataset.parts.get(part, ())
        if not len(where):
            raise errors.UsageError(
                f"{dataset.name}: {'an empty' if part in dataset.parts else 'no'} part {part!r} of "
                "the test examples: expected positions of some in Dataset.parts['database'] and "
                "['queries'], what is searched and what is searched for."
            )


def city_of(client: str) -> str:
    """The city in the name of a client, `zurich/a1b2`."""
    return client.partition("/")[0]
