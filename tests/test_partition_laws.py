"""The laws beside Dirichlet and IID: who owns what, their limits, and what they refuse."""

import dataclasses

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import fedjax_flat as ff
from fedjax_flat.data import (
    PARTITIONS,
    class_counts,
    dirichlet,
    iid,
    natural,
    pachinko,
    per_class,
    shards,
    statistics,
)
from fedjax_flat.data.partition.counts import apportion
from fedjax_flat.data.sources import digits

CIFAR10 = np.repeat(np.arange(10), 5000)
CIFAR100 = np.repeat(np.arange(100), 500)
COARSE = tuple(c % 20 for c in range(100))

LAWS = {  # (labels, clients, seed) -> partition, and whether every example has an owner
    "iid": (lambda y, k, s: iid(y, k, seed=s), True),
    "iid sizes": (lambda y, k, s: iid(y, k, seed=s, size_alpha=0.3), True),
    "dirichlet drawn": (lambda y, k, s: dirichlet(y, k, alpha=0.3, seed=s), True),
    "dirichlet rounded": (lambda y, k, s: dirichlet(y, k, alpha=0.3, seed=s, counts="rounded"),
                          True),
    "dirichlet sizes": (lambda y, k, s: dirichlet(y, k, alpha=2.0, seed=s, size_alpha=1.0), True),
    "dirichlet sharp": (lambda y, k, s: dirichlet(y, k, alpha=1e-4, seed=s, counts="rounded"),
                        True),
    "per class": (lambda y, k, s: per_class(y, k, alpha=0.3, seed=s), True),
    "per class sharp": (lambda y, k, s: per_class(y, k, alpha=1e-3, seed=s, cap=True), True),
    "per class cap": (lambda y, k, s: per_class(y, k, alpha=0.3, seed=s, cap=True, draws=3), True),
    "per class rounded": (lambda y, k, s: per_class(y, k, alpha=0.3, seed=s, rounded=True), False),
    "pachinko": (lambda y, k, s: pachinko(y, (0, 1, 0, 1, 2), k, seed=s), True),
    "shards": (lambda y, k, s: shards(y, k, shards_per_client=1, seed=s), True),
    "natural": (lambda y, k, s: natural(y % k, seed=s), True),
    "natural few": (lambda y, k, s: natural(y, seed=s, max_size=3, resize_to=1), False),
}


@pytest.mark.parametrize("law", LAWS)
@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    clients=st.integers(1, 12),
    seed=st.integers(0, 2**31),
)
def test_every_example_is_owned_at_most_once(law, labels, clients, seed):
    """By every law, whatever the labels; and by somebody where the law says so."""
    make, everything = LAWS[law]
    labels, clients = np.array(labels), min(clients, len(labels))
    partition = make(labels, clients, seed)
    partition.check(len(labels))
    assert partition.offsets[-1] == partition.indices.size
    assert partition.num_clients == clients or law.startswith("natural")
    if everything:
        np.testing.assert_array_equal(np.sort(partition.indices), np.arange(len(labels)))
    assert make(labels, clients, seed).content_hash == partition.content_hash


@pytest.mark.parametrize("law", LAWS)
def test_another_seed_is_another_partition(law):
    labels = np.repeat(np.arange(5), 40)
    one, two = (LAWS[law][0](labels, 5, seed).content_hash for seed in (0, 1))
    assert (one == two) == (law == "natural")


@pytest.mark.parametrize("law", LAWS)
def test_labels_of_bytes(law):
    """Labels come from files as bytes; arithmetic in their type would wrap around."""
    labels = np.repeat(np.arange(5), 40)
    wide, narrow = (LAWS[law][0](labels.astype(t), 5, 0).content_hash for t in ("int64", "uint8"))
    assert wide == narrow


def test_apportion_against_its_definition():
    """Within one of the exact share, in sum the total, the largest remainders rounded up."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        weights, total = rng.dirichlet(np.full(9, 0.5)), int(rng.integers(1, 80))
        counts = apportion(weights, total)
        exact = weights * total
        assert counts.sum() == total
        up = counts > np.floor(exact)
        assert np.all(counts[up] == np.floor(exact[up]) + 1)
        remainder = exact - np.floor(exact)
        assert up.all() or not up.any() or remainder[up].min() >= remainder[~up].max()
    np.testing.assert_array_equal(apportion([1, 0, 0], 6, low=1, high=3), [3, 2, 1])
    np.testing.assert_array_equal(apportion([5e-324, 0.0, 5e-324], 4), [2, 0, 2])


def test_sizes_by_dirichlet():
    """Variance of a share q_k ~ Dir(a) over K clients: (1 / K)(1 - 1 / K) / (K a + 1)."""
    sizes = np.array([iid(CIFAR10, 10, seed=s, size_alpha=2.0).sizes for s in range(200)])
    assert set(sizes.sum(1)) == {50_000}
    assert np.var(sizes / 50_000) == pytest.approx(0.1 * 0.9 / 21, rel=0.15)
    assert iid(CIFAR10, 10, seed=0, size_alpha=1e9).sizes.std() < 20


@pytest.mark.parametrize("counts", ["drawn", "rounded"])
def test_dirichlet_at_infinity_is_stratified_and_at_zero_one_class(counts):
    near = dirichlet(CIFAR10, 100, alpha=1e12, seed=0, counts=counts)
    spread = class_counts(near, CIFAR10, 10).std()
    assert spread < 0.1 if counts == "rounded" else 4 < spread < 11  # sqrt(500 * .1 * .9) = 6.7
    sharp = statistics(dirichlet(CIFAR10, 100, alpha=1e-6, seed=0, counts=counts), CIFAR10)
    assert sharp["mean_classes"] < 1.15


def test_per_class_follows_its_law():
    """Share of a class that one of K clients has: mean 1 / K, variance (K - 1) / K^2 (K a + 1)."""
    labels = np.repeat([0, 1], 4000)
    found = np.array([
        class_counts(per_class(labels, 5, alpha=0.5, seed=s), labels, 2) for s in range(300)
    ]) / 4000
    assert found.mean() == pytest.approx(0.2)
    assert found.var() == pytest.approx(4 / 25 / 3.5, rel=0.1)
    same = class_counts(per_class(CIFAR10, 10, alpha=1e9, seed=0), CIFAR10, 10)
    assert same.min() >= 498
    assert same.max() <= 502


def test_per_class_with_a_cap_is_nearly_of_equal_sizes():
    free = per_class(CIFAR100, 500, alpha=0.2, seed=0).sizes
    capped = per_class(CIFAR100, 500, alpha=0.2, seed=0, cap=True).sizes
    best = per_class(CIFAR100, 500, alpha=0.2, seed=0, cap=True, draws=20).sizes
    assert best.std() < capped.std() < 0.75 * free.std()
    # A client is over 100 only by the class that took it there.
    counts = class_counts(per_class(CIFAR100, 500, alpha=0.2, seed=0, cap=True), CIFAR100, 100)
    over = counts.sum(1) > 100
    assert over.any()
    assert np.all(counts.sum(1)[over] - counts.max(1)[over] < 100)


def test_per_class_best_of_several_draws():
    deviations = [
        per_class(CIFAR10, 20, alpha=0.5, seed=3, draws=n).sizes.std() for n in (1, 5, 40)
    ]
    assert deviations[0] >= deviations[1] >= deviations[2]
    assert deviations[0] > deviations[2]


def test_per_class_minimum_size():
    labels = CIFAR10[::10]
    free = [per_class(labels, 10, alpha=0.1, seed=s).sizes.min() for s in range(5)]
    least = [per_class(labels, 10, alpha=0.1, seed=s, min_size=150).sizes.min() for s in range(5)]
    assert min(free) < 150 <= min(least)


def test_per_class_rounded_is_moras_unbalanced_split():
    """round(500 q) of each class: about 50,000 in all, nobody's twice, sizes far apart."""
    partition = per_class(CIFAR100, 100, alpha=0.1, seed=0, min_size=1, rounded=True)
    partition.check(50_000)
    assert 48_000 < partition.indices.size < 50_000
    assert partition.sizes.std() > 100


def test_pachinko_as_in_tff():
    """500 clients of 100 examples, few coarse labels each, and within them most fine ones."""
    partition = pachinko(CIFAR100, COARSE, 500, seed=0)
    assert set(partition.sizes) == {100}
    np.testing.assert_array_equal(np.sort(partition.indices), np.arange(50_000))
    fine = class_counts(partition, CIFAR100, 100)
    coarse = class_counts(partition, np.array(COARSE)[CIFAR100], 20)
    # Of 20 labels with Dir(0.1), 100 draws show 20 (1 - prod_i (1.9 + i) / (2 + i)); later clients
    # find fewer.
    shown = 20 * (1 - np.prod((1.9 + np.arange(100)) / (2 + np.arange(100))))
    assert 0.8 * shown < (coarse > 0).sum(1).mean() < shown
    large = coarse > 40
    children = np.stack([(fine[:, np.array(COARSE) == a] > 0).sum(1) for a in range(20)], axis=1)
    assert children[large].mean() > 4.5


def test_pachinko_first_client_follows_both_dirichlets():
    """Shares of coarse and, within one, fine labels of a client whom nothing has run out for."""
    labels, coarse = np.repeat(np.arange(4), 20_000), (0, 0, 1, 1)
    of_coarse, within = [], []
    for seed in range(200):
        own = labels[pachinko(labels, coarse, 40, seed=seed, coarse_alpha=1.0).client(0)]
        of_coarse.append(np.mean(own < 2))
        within.append(np.mean(own[own < 2] == 0) if np.count_nonzero(own < 2) > 300 else np.nan)
    assert np.mean(of_coarse) == pytest.approx(0.5, abs=0.08)
    assert np.var(of_coarse) == pytest.approx(0.25 / 3, rel=0.25)
    assert np.nanvar(within) == pytest.approx(0.25 / 21, rel=0.4)


def test_pachinko_with_one_coarse_label_is_dirichlet():
    """Dir(a) over C classes is `dirichlet` with alpha = C a, and the root has nothing to choose."""
    one = [statistics(pachinko(CIFAR10, (0,) * 10, 100, seed=s, fine_alpha=0.05), CIFAR10)
           for s in range(8)]
    two = [statistics(dirichlet(CIFAR10, 100, alpha=0.5, seed=s), CIFAR10) for s in range(8)]
    mean = [np.mean([x["mean_classes"] for x in found]) for found in (one, two)]
    assert mean[0] == pytest.approx(mean[1], abs=0.35)


def test_shards_as_in_mcmahan():
    partition = shards(CIFAR10, 100, shards_per_client=2, seed=0)
    counts = class_counts(partition, CIFAR10, 10)
    assert set(partition.sizes) == {500}
    assert set(counts.ravel()) == {0, 250, 500}
    assert (counts == 500).any(), "two shards of one label"
    assert shards(CIFAR10[:-7], 100, shards_per_client=2, seed=0).indices.size == 49_993


@pytest.mark.parametrize("labels_each", [1, 3, 10])
def test_shards_of_different_labels(labels_each):
    counts = class_counts(
        shards(CIFAR10, 40, shards_per_client=labels_each, seed=0, distinct=True), CIFAR10, 10
    )
    assert set((counts > 0).sum(1)) == {labels_each}
    assert set((counts > 0).sum(0)) == {4 * labels_each}
    assert counts.sum() == 50_000
    assert counts[counts > 0].max() - counts[counts > 0].min() <= 1
    if labels_each == 3:
        combinations = {tuple(np.flatnonzero(row)) for row in counts}
        assert len(combinations) > 15, "dealt at random, not in a row"


def test_shards_of_uneven_labels():
    labels = np.repeat([0, 1, 2], [500, 30, 10])
    counts = class_counts(shards(labels, 6, shards_per_client=2, seed=0, distinct=True), labels, 3)
    assert set((counts > 0).sum(1)) == {2}
    np.testing.assert_array_equal(counts.sum(0), [500, 30, 10])


OWNERS = np.repeat([0, 1, 2, 3, 4], [1, 10, 3, 40, 6])


def test_natural_clients():
    shuffled = np.random.default_rng(0).permutation(OWNERS)
    partition = natural(shuffled)
    for k in range(5):
        np.testing.assert_array_equal(partition.client(k), np.flatnonzero(shuffled == k))
    np.testing.assert_array_equal(natural(OWNERS, min_size=5).sizes, [10, 40, 6])
    np.testing.assert_array_equal(natural(OWNERS, max_size=8).sizes, [1, 8, 3, 8, 6])
    assert set(natural(OWNERS, max_size=8).client(3)) < set(range(14, 54))
    without = natural(np.where(OWNERS == 1, -1, OWNERS), min_size=1)
    assert not set(range(1, 11)) & set(without.indices.tolist())
    np.testing.assert_array_equal(without.sizes, [1, 3, 40, 6])


def test_natural_sizes_with_examples_at_random():
    """LEAF's IID twin: the sizes of the natural clients, whoever's the examples were."""
    labels = np.repeat(np.arange(20), 500)
    partition = natural(labels, shuffled=True)
    np.testing.assert_array_equal(partition.sizes, np.full(20, 500))
    counts = class_counts(partition, labels, 20)
    assert counts.min() > 5
    np.testing.assert_array_equal(np.sort(partition.indices), np.arange(10_000))


PLACES = ("proximity", "clustering", "random_places")  # of sequences: test_place_splits.py


def test_registered_laws_run_with_their_defaults():
    dataset = dataclasses.replace(
        digits(), owners=np.arange(1442) % 30, coarse=tuple(c // 2 for c in range(10))
    )
    for name, law in PARTITIONS.items():
        if name not in ("released", "rare_classes", *PLACES):  # of files; of labels of pixels
            options = {n: s.default for n, s in law.settings.items()}
            partition = law.make(dataset, None, **options)
            partition.check(1442)
            assert partition.num_clients == (30 if name == "natural" else 20)
            assert law.doc


def _made(name, dataset, **changed):
    law = PARTITIONS[name]
    return law.make(dataset, None, **{**{n: s.default for n, s in law.settings.items()}, **changed})


REGRESSION = dataclasses.replace(
    digits(), train=ff.data.Examples(np.zeros((9, 2)), np.zeros(9)), name="curve"
)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: per_class(CIFAR10, 10, alpha=0, seed=0), "alpha = 0: expected a number above 0"),
        (lambda: per_class(CIFAR10, 10, alpha=-1, seed=0), "alpha = -1"),
        (lambda: per_class([0, 1], 3, alpha=1, seed=0), "3 clients for 2 examples"),
        (lambda: per_class([0.1, 1], 1, alpha=1, seed=0), "are no classes"),
        (lambda: per_class(CIFAR10, 10, alpha=1, seed=0, draws=0), "draws = 0"),
        (lambda: per_class(CIFAR10, 10, alpha=1, seed=0, min_size=5001), "expected 5000 or less"),
        (lambda: per_class(CIFAR10[::50], 50, alpha=0.1, seed=0, min_size=19), "Lower min_size"),
        (lambda: pachinko(CIFAR100, COARSE, 5, seed=0, coarse_alpha=0), "coarse_alpha = 0"),
        (lambda: pachinko(CIFAR100, COARSE, 5, seed=0, fine_alpha=-1), "fine_alpha = -1"),
        (lambda: pachinko(CIFAR100, COARSE[:50], 5, seed=0), "superclass of every class"),
        (lambda: pachinko([0, 1], (0, 0), 3, seed=0), "3 clients for 2 examples"),
        (lambda: shards(CIFAR10, 10, shards_per_client=0, seed=0), "shards_per_client = 0"),
        (lambda: shards(CIFAR10, 0, shards_per_client=1, seed=0), "num_clients = 0"),
        (lambda: shards([0, 1, 2], 2, shards_per_client=2, seed=0), "at most one shard"),
        (lambda: shards(CIFAR10, 20, shards_per_client=11, seed=0, distinct=True), "at most 10"),
        (lambda: shards(CIFAR10, 3, shards_per_client=2, seed=0, distinct=True),
         "every label with somebody"),
        (lambda: natural([0.5, 1.0]), "the number of a client for each example"),
        (lambda: natural([0, -2]), "the number of a client for each example"),
        (lambda: natural([-1, -1]), "without a client"),
        (lambda: natural(OWNERS, min_size=41), "41 leaves no client: the largest has 40"),
        (lambda: natural(OWNERS, max_size=-1), "max_size = -1"),
        (lambda: natural(OWNERS, resize_to=61), "61 clients for 60 examples"),
        (lambda: _made("natural", digits()), "digits has no owners"),
        (lambda: _made("pachinko", digits()), "digits has none"),
        *((lambda name=name: _made(name, REGRESSION), f"partition {name} needs one class")
          for name in ("dirichlet", "per_class", "pachinko", "shards")),
    ],
)
def test_wrong_inputs(make, message):
    with pytest.raises(ff.UsageError, match=message):
        make()
