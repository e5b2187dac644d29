"""Data sets whose examples come by client: writers, roles, people who ask and answer.

The natural clients are those with train examples. Test examples of anybody else are kept as
nobody's, and one sentence says how many.
"""

import logging
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.sources import files
from fedjax_flat.data.sources.base import Dataset, Examples
from fedjax_flat.settings import Setting

logger = logging.getLogger("fedjax_flat")

ByClient = Mapping[str, Examples]


def by_client(
    name: str, train: ByClient, test: ByClient, num_classes: int, **about: Any
) -> Dataset:
    """One data set of all clients, in the order of their names; `about` goes into `Dataset`."""
    train = {client: part for client, part in train.items() if len(part.labels)}
    test = {client: part for client, part in test.items() if len(part.labels)}
    for split, parts in (("train", train), ("test", test)):
        if not parts:
            raise errors.UsageError(
                f"{name}: no client has a {split} example. The files are empty, or settings leave "
                "nothing of them."
            )
    clients = tuple(sorted(train))
    number = {client: k for k, client in enumerate(clients)}
    strangers = sorted(set(test) - set(train))
    if strangers:
        count = sum(len(test[client].labels) for client in strangers)
        who = strangers[0] if len(strangers) == 1 else f"{len(strangers):,} clients"
        logger.info("%s: without train examples: %s. Their %s test examples count as nobody's.",
                    name, who, f"{count:,}")
    return Dataset(
        name, _joined(train), _joined(test), num_classes,
        owners=_owners(train, number), test_owners=_owners(test, number), clients=clients, **about,
    )


def _joined(parts: ByClient) -> Examples:
    ordered = [parts[client] for client in sorted(parts)]
    return Examples(np.concatenate([p.inputs for p in ordered]),
                    np.concatenate([p.labels for p in ordered]))


def _owners(parts: ByClient, number: Mapping[str, int]) -> np.ndarray:
    ordered = sorted(parts)
    numbers = np.array([number.get(client, -1) for client in ordered], np.int32)
    return np.repeat(numbers, [len(parts[client].labels) for client in ordered])


def layout_setting(layouts: Mapping[str, str]) -> Setting:
    """Which of several layouts is read."""
    return Setting("any", "of the files; any is the one that is there", choices=("any", *layouts))


def choose_layout(
    dataset: str, folder: pathlib.Path | None, layouts: Mapping[str, str], layout: str
) -> tuple[str, pathlib.Path]:
    """The name and place of the asked layout, `{name: place in the folder}`, that is there."""
    wanted = layouts if layout == "any" else {layout: layouts[layout]}
    found = [name for name, place in wanted.items() if files.find(folder, [place])]
    if len(found) > 1:
        raise errors.UsageError(
            f"{dataset}: {folder} has {' and '.join(layouts[name] for name in found)}, which differ"
            f". Say which with --config.data.layout={' or '.join(found)}."
        )
    place = files.need(dataset, folder, list(wanted.values()))
    return found[0], place


def says_here(layouts: Mapping[str, str]) -> Callable[[pathlib.Path | None], bool]:
    """Whether one of the layouts is in a folder."""
    return files.is_here(*layouts.values())
