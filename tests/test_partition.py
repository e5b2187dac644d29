"""Partitions: everyone owns something once, and the label skew is that of Hsu et al."""

import numpy as np
import pytest

import fedjax_flat as ff
from fedjax_flat.data import Partition, dirichlet, iid, released, statistics
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
def test_classes_per_client_as_released(labels, alpha, low, high):
    """A literal symmetric Dir(alpha) would give 2.9, 9.9, 66 and 97."""
    stats = [statistics(dirichlet(labels, 100, alpha=alpha, seed=s), labels) for s in range(5)]
    assert low < np.mean([s["mean_classes"] for s in stats]) < high
    assert {s["min_size"] for s in stats} == {s["max_size"] for s in stats} == {500}


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
    with pytest.raises(ff.UsageError, match=r"Did you mean 'cifar10_alpha_0.50'"):
        released(path, "cifar10_alpha_0.5")
