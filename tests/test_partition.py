"""Partitions: everyone owns something once, and the label skew is that of Hsu et al."""

import numpy as np
import pytest

import fedjax_flat as ff
from fedjax_flat.data import (
    Partition,
    class_counts,
    dirichlet,
    hold_out,
    iid,
    released,
    statistics,
)
from fedjax_flat.data.sources import digits

CIFAR10_LABELS = np.repeat(np.arange(10), 5000)
CIFAR100_LABELS = np.repeat(np.arange(100), 500)


def owns_everything_once(partition, num_examples):
    return np.array_equal(np.sort(partition.indices), np.arange(num_examples))


@pytest.mark.parametrize("size_sigma", [0.0, 0.7])
@pytest.mark.parametrize("clients", [1, 7, 20])
@pytest.mark.parametrize("alpha", [None, 0.05, 0.5, 100])
def test_every_example_has_one_owner(alpha, clients, size_sigma):
    labels = digits().train.labels
    for seed in range(3):
        options = {"seed": seed, "size_sigma": size_sigma}
        partition = (
            iid(labels, clients, **options)
            if alpha is None
            else dirichlet(labels, clients, alpha=alpha, **options)
        )
        assert partition.num_clients == clients
        assert owns_everything_once(partition, len(labels))
        spread = partition.sizes.max() - partition.sizes.min()
        assert (spread > 1) == (size_sigma > 0 and clients > 1)


@pytest.mark.parametrize(
    ("labels", "alpha", "low", "high"),
    [  # the released splits have 1.32, 9.90, 5.13 and 98.8 classes per client (thesis 4.1)
        (CIFAR10_LABELS, 0.05, 1.15, 1.55),
        (CIFAR10_LABELS, 100, 9.7, 10.0),
        (CIFAR100_LABELS, 0.5, 3.5, 5.5),
        (CIFAR100_LABELS, 1000, 93.0, 99.5),
    ],
)
def test_classes_per_client_of_both_laws(labels, alpha, low, high):
    """A literal symmetric Dir(alpha) would give 2.9, 9.9, 66 and 97."""
    for counts in ("drawn", "rounded"):
        stats = [statistics(dirichlet(labels, 100, alpha=alpha, seed=s, counts=counts), labels)
                 for s in range(3)]
        assert low < np.mean([s["mean_classes"] for s in stats]) < high
        assert {s["min_size"] for s in stats} == {s["max_size"] for s in stats} == {500}


# Of the released splits: least and mean number of classes per client, variance of the counts, and
# how many of these are one to four. `test_released_splits` reads the same from the files.
RELEASED = {
    "cifar100_alpha_0.50": (2, 5.13, 1520.6, 152),
    "cifar100_alpha_1000.00": (42, 98.82, 3.46, 3985),
}


def law_statistics(partition, labels):
    counts = class_counts(partition, labels, labels.max() + 1)
    classes = (counts > 0).sum(1)
    few = ((counts > 0) & (counts < 5)).sum()
    return classes.min(), classes.mean(), counts.var(), few


@pytest.mark.parametrize(("alpha", "told_apart"), [(0.5, [1, 3]), (1000, [0, 1, 2, 3])])
def test_the_law_of_the_released_splits_is_the_rounded_one(alpha, told_apart):
    """Within three deviations over seeds; three and more from `drawn` where the laws differ."""
    labels = CIFAR100_LABELS
    target = np.array(RELEASED[f"cifar100_alpha_{alpha:.2f}"])
    away = {}
    for counts in ("rounded", "drawn"):
        found = np.array([
            law_statistics(dirichlet(labels, 100, alpha=alpha, seed=s, counts=counts), labels)
            for s in range(24)
        ])
        away[counts] = np.abs(target - found.mean(0)) / found.std(0)
    assert np.all(away["rounded"] < 3)
    assert np.all(away["drawn"][told_apart] > 3)
    assert away["drawn"][told_apart].mean() > 6


def test_partitions_of_earlier_versions_stay_as_they_were():
    """Run folders hold the hash of their clients; these are of the first version."""
    first = {
        "iid": iid(CIFAR10_LABELS, 100, seed=3),
        "iid, sizes": iid(CIFAR10_LABELS, 7, seed=3, size_sigma=0.7),
        "dirichlet": dirichlet(CIFAR10_LABELS, 100, alpha=0.1, seed=4),
        "dirichlet, sizes": dirichlet(CIFAR10_LABELS, 13, alpha=1, seed=4, size_sigma=0.5),
        "one class": dirichlet(CIFAR10_LABELS, 40, alpha=0, seed=1),
    }
    assert [p.content_hash[:16] for p in first.values()] == [
        "62fa42032c42755e", "770d07f182c45bf3", "010f600da4f734e4", "841c7187aaf736a9",
        "6394f4f0b8734497",
    ]
    kept = [hold_out(p, 0.2)[0].content_hash[:16] for p in first.values()]
    assert kept == ["a14503647c61d04d", "567d2291cc596730", "608259a2d914474d", "6deb8ba7ec5f72b7",
                    "a6cd7fd9637fd566"]
    assert hold_out(first["iid"], 0.1, source="server", seed=2)[0].content_hash.startswith("d1206a")


@pytest.mark.parametrize(("labels", "per_class"), [(CIFAR10_LABELS, 10), (CIFAR100_LABELS, 1)])
def test_alpha_zero_is_one_class_per_client(labels, per_class):
    partition = dirichlet(labels, 100, alpha=0, seed=0)
    classes = [np.unique(labels[partition.client(k)]) for k in range(100)]
    assert all(len(c) == 1 for c in classes)
    assert set(np.bincount(np.concatenate(classes))) == {per_class}
    assert set(partition.sizes) == {500}
    assert owns_everything_once(partition, len(labels))


def test_alpha_zero_with_unequal_classes_and_a_number_that_does_not_divide():
    labels = np.repeat([0, 1, 2], [50, 8, 2])
    partition = dirichlet(labels, 7, alpha=0, seed=0)
    counts = np.bincount([labels[partition.client(k)[0]] for k in range(7)])
    np.testing.assert_array_equal(counts, [5, 1, 1])
    assert owns_everything_once(partition, 60)


def test_alpha_zero_is_the_limit():
    stats = statistics(dirichlet(CIFAR10_LABELS, 100, alpha=1e-6, seed=0), CIFAR10_LABELS)
    assert stats["mean_classes"] < 1.15


def test_first_client_follows_the_dirichlet_law():
    """Class share of one client: mean p_c, variance p_c (1 - p_c) / (alpha + 1)."""
    labels = np.repeat([0, 1], [30_000, 10_000])
    # One client in a hundred: classes cannot run out for it.
    share = []
    for seed in range(400):
        partition = dirichlet(labels, 100, alpha=3.0, seed=seed)
        share.append(np.mean(labels[partition.client(0)]))
    assert np.mean(share) == pytest.approx(0.25, abs=4 * np.sqrt(0.1875 / 4 / 400))
    assert np.var(share) == pytest.approx(0.25 * 0.75 / 4, rel=0.25)


def test_seeds_and_hashes():
    labels = CIFAR10_LABELS
    first, again, other = (dirichlet(labels, 10, alpha=0.5, seed=s) for s in (0, 0, 1))
    assert first.content_hash == again.content_hash != other.content_hash


def test_save_and_load(tmp_path):
    partition = iid(CIFAR10_LABELS, 10, seed=0)
    partition.save(tmp_path / "p.npz")
    assert Partition.load(tmp_path / "p.npz").content_hash == partition.content_hash
    content = (tmp_path / "p.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(content[: len(content) // 2])
    with pytest.raises(ff.UsageError, match="is not a saved partition"):
        Partition.load(tmp_path / "cut.npz")
    altered = partition.indices.copy()
    altered[0], altered[1] = altered[1], altered[0]
    np.savez(tmp_path / "altered.npz", indices=altered, offsets=partition.offsets,
             content_hash=np.array(partition.content_hash))
    with pytest.raises(ff.UsageError, match="content hash differs"):
        Partition.load(tmp_path / "altered.npz")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dirichlet(CIFAR10_LABELS, 10, alpha=-0.5, seed=0), "cannot be negative"),
        (lambda: dirichlet(CIFAR10_LABELS, 5, alpha=0, seed=0), "at least 10 clients"),
        (lambda: dirichlet(CIFAR10_LABELS, 50, alpha=0, seed=0, size_sigma=1.0), "size_sigma"),
        (lambda: dirichlet(CIFAR10_LABELS, 50, alpha=0, seed=0, size_alpha=1.0), "size_alpha"),
        (lambda: dirichlet(CIFAR10_LABELS, 50, alpha=0, seed=0, counts="rounded"), "to round"),
        (lambda: dirichlet(CIFAR10_LABELS, 50, alpha=1, seed=0, counts="round"),
         "Did you mean 'rounded'"),
        (lambda: dirichlet([0.5, 1.0], 1, alpha=1, seed=0), "are no classes"),
        (lambda: dirichlet([[0], [1]], 1, alpha=1, seed=0), "are no classes"),
        (lambda: iid([0, 1], 1, seed=0, size_sigma=1.0, size_alpha=1.0), "two laws of sizes"),
        (lambda: iid([0, 1], 1, seed=0, size_alpha=-1.0), "size_alpha = -1.0"),
        (lambda: iid([0, 1], 3, seed=0), "3 clients for 2 examples"),
        (lambda: iid([0, 1], 0, seed=0), "0 clients for 2 examples"),
        (lambda: iid([0, 1], 1, seed=0, size_sigma=-1.0), "size_sigma = -1.0"),
        (lambda: Partition.of([[0, 1], [1]]).check(2), "example 1 to 2 clients"),
        (lambda: Partition.of([[0, 9]]).check(2), "made for another dataset"),
        (lambda: released("nowhere.npz", "x"), "cannot read released splits"),
    ],
)
def test_wrong_inputs(make, message):
    with pytest.raises(ff.UsageError, match=message):
        make()


def test_released_splits(cifar_dir):
    path = cifar_dir / "fedsam-splits.npz"
    labels = ff.data.load("cifar10", cifar_dir).train.labels
    partition = released(path, "cifar10_alpha_0.05")
    partition.check(50_000)
    assert set(np.arange(50_000)) - set(partition.indices.tolist()) == {10_100}
    assert statistics(partition, labels)["mean_classes"] == pytest.approx(1.32, abs=0.01)
    one_class = statistics(released(path, "cifar10_alpha_0.00"), labels)
    assert (one_class["min_classes"], one_class["max_classes"]) == (1, 1)
    fine = ff.data.load("cifar100", cifar_dir).train.labels
    for name, figures in RELEASED.items():
        assert law_statistics(released(path, name), fine) == pytest.approx(figures, rel=2e-3)
    with pytest.raises(ff.UsageError, match=r"Did you mean 'cifar10_alpha_0.50'"):
        released(path, "cifar10_alpha_0.5")
