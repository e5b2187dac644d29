"""Parts of what clients own: for validation, for a test of each client's own, fewer of a class.

`local_split` follows Pillutla et al., "Federated learning with partial model personalization"
(2022): clients below a minimum size are dropped, large ones cut, and about 45 % of each go into its
local test. Rounded up, as the released Pers-Geo-100 has it (at least 10 examples per client, at
least 5 in train, 46.1 % in test).

`imbalance` has the variants of Fed3R's ablation on CIFAR-100: classes in random groups of equal
size, each group keeping its own share of every class, half of all examples in total.
"""

from typing import Any

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.partition.base import Partition, class_labels

VARIANTS = {  # share of its examples that a class keeps, one for each group of classes
    "A": (0.5,),
    "B": (0.25, 0.75),
    "C": (0.2, 0.4, 0.6, 0.8),
    "D": tuple((5 + 10 * i) / 100 for i in range(10)),
}


def hold_out(
    partition: Partition, share: float, *, source: str = "clients", seed: int = 0,
    setting: str = "data.validation",
) -> tuple[Partition, np.ndarray]:
    """(what clients keep to train on, those held out): `share` of their examples, by `setting`.

    From `clients`: that share of every client's. From `server`: of all of theirs, whoever has them.
    """
    errors.lookup("data.validation_from", source, dict.fromkeys(("clients", "server")))
    partition.check_clients()
    rng = np.random.default_rng([seed, 1])
    if source == "clients":
        taken = np.concatenate([
            rng.permutation(own)[: int(share * len(own))]
            for own in np.split(partition.indices, partition.offsets[1:-1])
        ])
    else:
        taken = rng.permutation(partition.indices)[: int(share * partition.indices.size)]
    if not taken.size:
        from_all = ", or take it from all: data.validation_from = 'server'"
        raise errors.UsageError(
            f"{setting} = {share} holds out no example: clients have {partition.sizes.min()} to "
            f"{partition.sizes.max()}. Raise it{from_all if source == 'clients' else ''}."
        )
    return partition.where(~_among(partition.indices, taken)), np.sort(taken)


def local_split(
    partition: Partition, share: float, *, min_size: int = 2, cap: int = 0, seed: int = 0,
    closed: Any = None,
) -> tuple[Partition, Partition]:
    """(train, test) of every client that has `min_size`, numbered alike; `share` in test.

    Each part has an example of every client. `cap`: clients keep so many at most, before that.
    Of labels that are `closed`, a client's test examples are of classes that it trains on: where
    all examples of a class were in test, one of them is in train instead.
    """
    if not 0 < share < 1:
        raise errors.UsageError(
            f"share = {share} leaves a client without train or without test examples: expected "
            "more than 0 and less than 1."
        )
    partition.check_clients()
    if cap and cap < 2:
        raise errors.UsageError(f"cap = {cap}: expected 2 or more, one for each part, or 0.")
    largest = partition.sizes.max()
    partition = partition.only(partition.sizes >= min_size)
    if not partition.num_clients:
        raise errors.UsageError(
            f"min_size = {min_size} leaves no client: the largest has {largest} examples."
        )
    if (least := partition.sizes.min()) < 2:
        raise errors.UsageError(
            f"client {partition.sizes.argmin()} has {least} examples, too few for a train and a "
            f"test part: expected min_size of 2 or more; it is {min_size}."
        )
    rng = np.random.default_rng([seed, 4])
    if cap:
        partition = capped(partition, cap, rng)
    in_test = np.ceil(share * partition.sizes - 1e-9).astype(int)
    in_test = np.clip(in_test, 1, partition.sizes - 1)
    test = _first(partition, in_test, rng)
    if closed is not None:
        label = class_labels(closed)[partition.indices].astype(np.int64)
        cell = partition.client_of * (label.max() + 1) + label
        lacking = np.flatnonzero(test & ~np.isin(cell, cell[~test]))
        test[lacking[np.unique(cell[lacking], return_index=True)[1]]] = False
    return partition.where(~test), partition.where(test)


def follow_owners(partition: Partition, owners, test_owners) -> Partition:
    """Test examples to the client that has most of their owner's train examples.

    `owners` of train and test examples are the same people. Of owners who are no client's, test
    examples are nobody's; a client may have none.
    """
    clients = partition.num_clients
    pairs, counts = np.unique(
        np.asarray(owners)[partition.indices].astype(np.int64) * clients + partition.client_of,
        return_counts=True,
    )
    client_of_owner = np.full(max(np.max(owners), np.max(test_owners)) + 2, -1)
    order = np.argsort(counts, kind="stable")  # the most at last, which stays
    client_of_owner[pairs[order] // clients] = pairs[order] % clients
    return Partition.from_owners(client_of_owner[np.asarray(test_owners)], clients)


def capped(partition: Partition, cap: int, rng) -> Partition:
    """The same clients, each with `cap` of its examples at most, at random, in their order."""
    errors.at_least("cap", cap, 1)
    return partition.where(_first(partition, np.minimum(partition.sizes, cap), rng))


def restrict(partition: Partition, kept) -> Partition:
    """The same clients with those of their examples that are among `kept`; some may have none."""
    return partition.where(_among(partition.indices, np.asarray(kept, np.int64)))


def imbalance(labels, variant: str, seed: int) -> np.ndarray:
    """The examples that stay when classes are made uneven as in variant A, B, C or D; sorted."""
    labels = class_labels(labels)
    shares = errors.lookup("imbalance", variant, VARIANTS)
    rng = np.random.default_rng([seed, 5])
    classes = rng.permutation(np.unique(labels))
    if len(classes) < len(shares):
        raise errors.UsageError(
            f"imbalance {variant} has {len(shares)} groups of classes, and there are "
            f"{len(classes)} classes. Choose another of {', '.join(VARIANTS)}."
        )
    kept = []
    for group, share in zip(np.array_split(classes, len(shares)), shares, strict=True):
        for c in group:
            own = rng.permutation(np.flatnonzero(labels == c))
            kept.append(own[: round(share * len(own))])
    return np.sort(np.concatenate(kept))


def _first(partition, numbers, rng) -> np.ndarray:
    """Which of `indices` are among a random `numbers[k]` of client k's."""
    order = np.lexsort((rng.random(partition.indices.size), partition.client_of))
    turn = np.arange(partition.indices.size) - np.repeat(partition.offsets[:-1], partition.sizes)
    chosen = np.empty(partition.indices.size, bool)
    chosen[order] = turn < np.repeat(numbers, partition.sizes)
    return chosen


def _among(indices, chosen) -> np.ndarray:
    """Whether each of `indices` is one of `chosen`."""
    count = max(indices.max(initial=-1), chosen.max(initial=-1)) + 1
    member = np.zeros(count, bool)
    member[chosen] = True
    return member[indices]
