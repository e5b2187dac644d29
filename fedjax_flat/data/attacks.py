"""Clients that swap labels on purpose: the label flipping attack of FedSeq's evaluation.

Caldarola 2024, section 5.2, table 5.5. A share L_S of the groups (`of_groups`) has attackers, in
each of these a share L of its clients (`share`); without groups, a share L_S L of all clients. An
attacker trains on labels of which some classes are swapped in pairs; what is evaluated stays right.

    swaps   0-2 | 3-5 | 0-2,3-5    those of CIFAR-10: airplane and bird, cat and dog
            intra                  as many pairs as half the superclasses, each inside one of them
            extra                  one class of every superclass, paired across superclasses
    choice  fixed                  all attackers swap the same classes
            random                 each pairs the classes that are named its own way, or draws its
                                   own pairs, intra or extra

Shares are rounded to the nearest number of groups and clients, halves up. Groups are made before
anybody attacks.
"""

import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.partition import Partition
from fedjax_flat.data.shift import SHIFTS, Shift
from fedjax_flat.data.sources import Dataset
from fedjax_flat.registry import entry
from fedjax_flat.settings import Setting

Pairs = list[tuple[int, int]]


def swap_labels(
    dataset: Dataset, clients: int, *, swaps: str, choice: str, share: float, of_groups: float,
    seed: int, groups: Partition | None = None,
) -> Shift:
    """Swapped labels on some clients of some groups, if there are groups."""
    if dataset.task != "classification" or np.ndim(dataset.train.labels) != 1:
        raise errors.UsageError(
            f"shift swap_labels of {dataset.name}, of task {dataset.task}: expected one class per "
            "example."
        )
    rng = np.random.default_rng([seed, 19])
    who = attackers(clients, share, of_groups, rng, groups)
    draw = pairs_of(swaps, dataset, random=choice == "random")
    maps = np.tile(np.arange(dataset.num_classes, dtype=np.int32), (clients, 1))
    same = draw(rng) if choice == "fixed" else None
    for k in who:
        maps[k] = swapped(dataset.num_classes, draw(rng) if same is None else same)

    def see(batch, client, index):
        del index
        wrong = jnp.asarray(maps)[client][batch.labels.astype(jnp.int32)]
        return batch._replace(labels=wrong.astype(batch.labels.dtype))

    return Shift(see, evaluated=False)


def attackers(
    clients: int, share: float, of_groups: float, rng, groups: Partition | None = None
) -> list[int]:
    """A share of the clients in a share of the groups; without groups, of all clients."""
    if groups is None:
        return sorted(rng.permutation(clients)[: _nearest(of_groups * share * clients)].tolist())
    found: list[int] = []
    for g in rng.permutation(groups.num_clients)[: _nearest(of_groups * groups.num_clients)]:
        own = rng.permutation(groups.client(g))
        found += own[: _nearest(share * len(own))].tolist()
    return sorted(found)


def _nearest(x: float) -> int:
    return math.floor(x + 0.5)


def swapped(classes: int, pairs: Pairs) -> np.ndarray:
    """new = map[old]."""
    new = np.arange(classes, dtype=np.int32)
    for a, b in pairs:
        new[a], new[b] = b, a
    return new


def pairs_of(text: str, dataset: Dataset, random: bool = False) -> Callable[..., Pairs]:
    """`draw(rng)`: the classes that are swapped."""
    if text in ("intra", "extra"):
        coarse = np.asarray(dataset.coarse)
        if not coarse.size:
            raise errors.UsageError(
                f"data.shift.swaps = {text}: {dataset.name} has no superclasses, as cifar100 has. "
                "Name pairs of classes, e.g. 0-2."
            )
        return _intra(coarse) if text == "intra" else _extra(coarse)
    pairs = _parsed(text, dataset.num_classes)
    named = [c for pair in pairs for c in pair]

    def draw(rng) -> Pairs:
        order = rng.permutation(named).tolist() if random else named
        return list(zip(order[::2], order[1::2], strict=True))

    return draw


def _intra(coarse: np.ndarray) -> Callable[..., Pairs]:
    def draw(rng) -> Pairs:
        count = coarse.max() + 1
        chosen = rng.permutation(count)[: count // 2]
        own = [rng.choice(np.flatnonzero(coarse == s), 2, replace=False) for s in chosen]
        return [(int(a), int(b)) for a, b in own]

    return draw


def _extra(coarse: np.ndarray) -> Callable[..., Pairs]:
    def draw(rng) -> Pairs:
        order = rng.permutation(coarse.max() + 1)
        one = [int(rng.choice(np.flatnonzero(coarse == s))) for s in order]
        return list(zip(one[::2], one[1::2], strict=False))

    return draw


def _parsed(text: str, classes: int) -> Pairs:
    def wrong(why: str):
        return errors.UsageError(
            f"data.shift.swaps = {text!r}: {why}. Expected pairs of classes, e.g. 0-2,3-5, or "
            "intra or extra."
        )

    pairs = []
    for word in text.split(","):
        ends = word.split("-")
        if len(ends) != 2 or not all(end.strip().isdigit() for end in ends):
            raise wrong(f"{word!r} is no pair")
        a, b = map(int, ends)
        if a == b:
            raise wrong(f"class {a} would become itself")
        if max(a, b) >= classes:
            raise wrong(f"there are {classes} classes, from 0, and no {max(a, b)}")
        pairs.append((a, b))
    named = [c for pair in pairs for c in pair]
    if len(set(named)) < len(named):
        raise wrong("a class is in two pairs")
    return pairs


SHIFTS.add("swap_labels", entry(swap_labels, {
    "swaps": Setting("0-2,3-5", "pairs of classes, or intra or extra"),
    "choice": Setting("fixed", "all swap the same, or each its own", choices=("fixed", "random")),
    "share": Setting(0.1, "of the clients", at_least=0, at_most=1),
    "of_groups": Setting(1.0, "of the groups, in which that share is", at_least=0, at_most=1),
    "seed": Setting(
        0, "apart from the training seed, so that seeds share their data", at_least=0, below=2**32
    ),
}))
