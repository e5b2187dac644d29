"""Of a partition: other numbers of clients, parts, fewer examples of a class, statistics."""

import sys

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import fedjax_flat as ff
from fedjax_flat.data import (
    Partition,
    class_counts,
    dirichlet,
    hold_out,
    iid,
    imbalance,
    local_split,
    mean_jaccard,
    natural,
    resized,
    restrict,
    statistics,
)
from fedjax_flat.testing import partition_of

CIFAR100 = np.repeat(np.arange(100), 500)
NOBODY = Partition.of([])


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
    wanted=st.integers(1, 12),
    seed=st.integers(0, 1000),
)
def test_resized_keeps_examples_and_never_mixes(sizes, wanted, seed):
    partition = partition_of(sizes)
    if wanted > sum(sizes):
        with pytest.raises(ff.UsageError, match=f"{wanted} clients for {sum(sizes)} examples"):
            resized(partition, wanted, seed)
        return
    new = resized(partition, wanted, seed)
    assert new.num_clients == wanted
    np.testing.assert_array_equal(np.sort(new.indices), np.sort(partition.indices))
    before = np.empty(sum(sizes), int)
    before[partition.indices] = partition.client_of
    for k in range(wanted):
        old = np.unique(before[new.client(k)])
        if wanted >= len(sizes):
            assert len(old) <= 1, "a part of one client"
        else:
            assert set(new.client(k)) == set(np.flatnonzero(np.isin(before, old))), "whole clients"


def test_resized_is_balanced():
    partition = partition_of((50, 1, 1, 30, 20, 48))
    np.testing.assert_array_equal(np.sort(resized(partition, 3, 0).sizes), [50, 50, 50])
    np.testing.assert_array_equal(
        np.sort(resized(partition_of((60, 10)), 5, 0).sizes), [10, 15, 15, 15, 15]
    )
    one, two = (resized(partition_of((60, 10)), 5, s).content_hash for s in (0, 1))
    assert one != two
    assert resized(partition, 6, 0).content_hash == partition.content_hash


def test_a_million_clients():
    """No loop over clients costs more than their number."""
    owners = np.random.default_rng(0).integers(0, 300_000, 600_000)
    partition = natural(owners, min_size=1, max_size=3, resize_to=1000, seed=1)
    assert partition.num_clients == 1000
    assert partition.sizes.max() - partition.sizes.min() <= 1
    many = iid(np.zeros(1_000_000, int), 1_000_000, seed=0)
    assert set(many.sizes) == {1}


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(lambda x: max(x) >= 2),
    share=st.floats(0.01, 0.99),
    cap=st.sampled_from([0, 2, 10]),
    min_size=st.integers(2, 6),
)
def test_local_split(sizes, share, cap, min_size):
    partition = partition_of(sizes)
    chosen = [k for k, n in enumerate(sizes) if n >= min_size]
    if not chosen:
        with pytest.raises(ff.UsageError, match="leaves no client"):
            local_split(partition, share, min_size=min_size)
        return
    train, test = local_split(partition, share, min_size=min_size, cap=cap, seed=3)
    assert train.num_clients == test.num_clients == len(chosen)
    for j, k in enumerate(chosen):
        own, n = set(partition.client(k).tolist()), min(sizes[k], cap or 99)
        in_train, in_test = set(train.client(j).tolist()), set(test.client(j).tolist())
        assert in_train | in_test <= own
        assert not in_train & in_test
        assert len(in_train) + len(in_test) == n
        assert len(in_test) == min(max(int(np.ceil(share * n - 1e-9)), 1), n - 1)


def test_local_split_as_released():
    """Pers-Geo-100: at least 10 examples each, 45 % in test rounded up, so 5 in train or more."""
    rng = np.random.default_rng(0)
    train, test = local_split(partition_of(rng.integers(4, 80, 500)), 0.45, min_size=10)
    assert train.sizes.min() >= 5
    assert 0.455 < test.sizes.sum() / (train.sizes.sum() + test.sizes.sum()) < 0.47
    first, again, other = (
        local_split(partition_of([40] * 5), 0.5, seed=s)[0].content_hash for s in (0, 0, 1)
    )
    assert first == again != other


@pytest.mark.parametrize(
    ("variant", "kept_of_class"),
    [("A", {250: 100}), ("B", {125: 50, 375: 50}), ("C", {100: 25, 200: 25, 300: 25, 400: 25}),
     ("D", {25 + 50 * i: 10 for i in range(10)})],
)
def test_imbalance_of_cifar100(variant, kept_of_class):
    kept = imbalance(CIFAR100, variant, seed=0)
    assert len(kept) == len(set(kept.tolist())) == 25_000
    sizes, times = np.unique(np.bincount(CIFAR100[kept]), return_counts=True)
    assert dict(zip(sizes.tolist(), times.tolist(), strict=True)) == kept_of_class
    assert not np.array_equal(kept, imbalance(CIFAR100, variant, seed=1))
    np.testing.assert_array_equal(kept, imbalance(CIFAR100, variant, seed=0))


def test_restrict_keeps_clients_and_order():
    partition = Partition.of([[5, 1, 3], [0, 2], [4]])
    fewer = restrict(partition, [0, 1, 2, 5, 9])
    assert [fewer.client(k).tolist() for k in range(3)] == [[5, 1], [0, 2], []]
    assert restrict(partition, np.array([5, 1], np.uint16)).sizes.tolist() == [2, 0, 0]
    assert restrict(partition, []).sizes.tolist() == [0, 0, 0]
    composed = restrict(dirichlet(CIFAR100, 100, alpha=0, seed=0), imbalance(CIFAR100, "B", seed=0))
    assert set(composed.sizes) == {125, 375}


def brute_force(partition, labels):
    sets = [set(labels[partition.client(k)].tolist()) for k in range(partition.num_clients)]
    pairs = [len(a & b) / len(a | b) if a | b else 1.0 for a in sets for b in sets]
    classes = [len(s) for s in sets]
    reach = [np.mean([c in s for s in sets]) for c in np.unique(labels)]
    return {
        "mean_jaccard": np.mean(pairs), "min_classes": min(classes),
        "mean_classes": np.mean(classes), "max_classes": max(classes),
        "min_clients_of_class": min(reach), "mean_clients_of_class": np.mean(reach),
        "max_clients_of_class": max(reach),
    }


@pytest.mark.parametrize("block", [3, 2048])
def test_statistics_against_the_definition(block, monkeypatch):
    module = sys.modules["fedjax_flat.data.partition.statistics"]  # the function has its name too
    monkeypatch.setattr(module, "_BLOCK", block)
    labels = np.random.default_rng(0).integers(3, 12, 300)
    partitions = [
        dirichlet(labels, 17, alpha=0.5, seed=0), iid(labels, 8, seed=0),
        Partition.of([[1, 2, 3], [], [7], [], [20, 21, 22, 23]]),
    ]
    for partition in partitions:
        found = statistics(partition, labels)
        for name, value in brute_force(partition, labels).items():
            assert found[name] == pytest.approx(value, rel=1e-6), name
        sizes = [len(partition.client(k)) for k in range(partition.num_clients)]
        assert found["mean_size"] == pytest.approx(np.mean(sizes))
        assert found["std_size"] == pytest.approx(np.std(sizes))
        assert (found["min_size"], found["max_size"]) == (min(sizes), max(sizes))
        assert found["examples"] == sum(sizes)
        rest = statistics(partition, labels, jaccard=False)
        assert {**rest, "mean_jaccard": found["mean_jaccard"]} == found
        counts = class_counts(partition, labels.astype(np.uint8), 12)
        for k in range(partition.num_clients):
            expected = np.bincount(labels[partition.client(k)], minlength=12)
            np.testing.assert_array_equal(counts[k], expected)


def test_limits_of_the_jaccard_index():
    assert mean_jaccard(dirichlet(CIFAR100, 100, alpha=0, seed=0), CIFAR100) == pytest.approx(0.01)
    assert mean_jaccard(iid(CIFAR100 % 2, 10, seed=0), CIFAR100 % 2) == pytest.approx(1.0)


def test_hold_out_of_a_share_of_each():
    kept, held = hold_out(partition_of((10, 25, 0, 40)), 0.2)
    np.testing.assert_array_equal(kept.sizes, [8, 20, 0, 32])
    assert not set(held.tolist()) & set(kept.indices.tolist())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: resized(partition_of((3, 2)), 0, 0), "0 clients for 5 examples"),
        (lambda: resized(NOBODY, 1, 0), "without a client"),
        (lambda: statistics(NOBODY, [0]), "without a client"),
        (lambda: mean_jaccard(NOBODY, [0]), "without a client"),
        (lambda: hold_out(NOBODY, 0.5), "without a client"),
        (lambda: local_split(NOBODY, 0.5), "without a client"),
        (lambda: statistics(partition_of((2,)), [0.5, 0.1]), "are no classes"),
        (lambda: class_counts(partition_of((2,)), [0, 4], 4), "labels 0 to 4 of 4 classes"),
        (lambda: class_counts(partition_of((2,)), [0, -1], 4), "labels -1 to 0"),
        (lambda: local_split(partition_of((9,)), 1.0), "share = 1.0 leaves a client without train"),
        (lambda: local_split(partition_of((9,)), 0.0), "or without test examples"),
        (lambda: local_split(partition_of((9, 1)), 0.5, min_size=1), "client 1 has 1 examples"),
        (lambda: local_split(partition_of((9, 1)), 0.5, min_size=10), "leaves no client"),
        (lambda: local_split(partition_of((9,)), 0.5, cap=1), "cap = 1"),
        (lambda: imbalance([0, 1], "E", 0), "expected one of A, B, C, D"),
        (lambda: imbalance([0, 1], "C", 0), "4 groups of classes, and there are 2"),
        (lambda: imbalance([0.5], "A", 0), "are no classes"),
    ],
)
def test_wrong_inputs(make, message):
    with pytest.raises(ff.UsageError, match=message):
        make()
