"""Examples on the host: the same bits as on the device, whatever the cohort and its sizes."""

import resource

import jax
import numpy as np
import pytest
from conftest import assert_same_bits, small_config

import fedjax_flat as ff
from fedjax_flat.data import HostData, Partition
from fedjax_flat.engine import sampling
from fedjax_flat.run.loop import train


def run(tmp_path, name, **settings):
    config = small_config(partition__size_sigma=0.8, **settings)
    return train(config, tmp_path / name, progress=False)


def untimed(records):
    return [{k: v for k, v in r.items() if k != "examples_per_s"} for r in records]


CASES = {
    "fedavg": {"data__shift__name": "noise", "data__local_test": 0.2, "eval__clients": True},
    "scaffold": {},
    "fedbn": {"model__norm": "batch"},
}


@pytest.mark.parametrize("method", CASES)
def test_host_has_the_bits_of_device(tmp_path, method):
    settings = {"algorithm__name": method, "rounds": 5, "cohort__size": 4, **CASES[method]}
    device = run(tmp_path, "device", data__placement="device", **settings)
    host = run(tmp_path, "host", data__placement="host", **settings)
    assert_same_bits(device.state, host.state)
    assert untimed(device.records) == untimed(host.records)


def test_resume_and_a_change_of_place_keep_the_bits(tmp_path):
    settings = {"algorithm__name": "scaffold", "cohort__size": 4}
    whole = run(tmp_path, "whole", data__placement="device", rounds=5, **settings)
    run(tmp_path, "parts", data__placement="host", rounds=2, **settings)
    run(tmp_path, "parts", data__placement="host", rounds=3, **settings)
    parts = run(tmp_path, "parts", data__placement="device", rounds=5, **settings)
    assert_same_bits(whole.state, parts.state)


@pytest.mark.slow
def test_bernoulli_cohorts_and_evaluation_of_train(tmp_path):
    settings = {
        "cohort__sampling": "bernoulli", "cohort__size": 3, "eval__splits": ("test", "train"),
        "eval__batch_size": 50, "curvature__every": 3, "curvature__clients": 1,
    }
    device = run(tmp_path, "device", data__placement="device", **settings)
    host = run(tmp_path, "host", data__placement="host", **settings)
    assert_same_bits(device.state, host.state)
    for a, b in zip(untimed(device.records), untimed(host.records), strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            if name in ("loss", "accuracy") and a["split"] == "train":  # summed in blocks
                assert b[name] == pytest.approx(value, rel=1e-6)
            else:
                assert b[name] == value


def lists(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return Partition.of(np.split(rng.permutation(sum(sizes)), np.cumsum(sizes)[:-1]))


def test_a_cohort_has_its_clients_examples_and_no_others():
    sizes = [3, 0, 5, 2, 4]
    partition = lists(sizes)
    x = np.arange(14, dtype=np.int64) * 10
    data = HostData(ff.data.Examples(x, x % 3), partition)
    for clients in ([4, 2], [1], [0, 1, 2, 3, 4], [3, 0]):
        found = data.of(np.array(clients))
        assert found.examples.inputs.dtype == np.int32
        largest = sum(sorted(sizes)[-len(clients):])
        assert found.examples.inputs.shape == (largest,), "room for the largest clients"
        for k in clients:
            one = found.client(jax.numpy.int32(k))
            batch = ff.data.federated.client_batch(one, np.arange(6))
            assert int(one.size) == sizes[k]
            np.testing.assert_array_equal(
                np.asarray(batch.inputs)[: sizes[k]], x[partition.client(k)]
            )
        assert found.max_size == 5
        assert not found.equal_sizes


def test_groups_on_the_host():
    partition = lists([3, 1, 2, 4])
    x = np.arange(10, dtype=np.float32)
    examples = ff.data.Examples(x, x)
    groups = Partition.of([[2, 0], [3, 1]])
    device = ff.data.grouped(ff.data.federate(examples, partition), groups)
    host = HostData(examples, partition, np.asarray(device.groups)).of(np.array([1]))
    total = lambda data: ff.data.over(lambda b: jax.numpy.where(b.mask, b.inputs, 0).sum(), data, 2)
    assert float(total(host.client(jax.numpy.int32(1)))) == float(
        total(device.client(jax.numpy.int32(1)))
    )


def test_a_file_is_read_only_where_asked(tmp_path):
    """Columns of a sparse file of 40 GB, of which only a few pages become resident."""
    path = tmp_path / "large"
    count = 4 * 10**7
    with open(path, "wb") as f:
        f.truncate(count * 1000)
    x = np.memmap(path, np.uint8, "r", shape=(count, 1000))
    own = np.arange(10**7, 10**7 + 6).reshape(2, 3)
    data = HostData(ff.data.Examples(x, x[:, 0]), Partition.of(own))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert data.of(np.array([1])).examples.inputs.shape == (3, 1000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000, "KB"


@pytest.mark.parametrize("make", [ff.uniform, ff.bernoulli])
def test_cohorts_of_many_clients_are_distinct_and_uniform(make):
    count = sampling.MANY + 1
    sample = jax.jit(jax.vmap(make(count, 50)))
    cohorts = sample(jax.random.split(jax.random.key(0), 200))
    clients = np.asarray(cohorts.clients)
    assert all(len(set(c)) == len(c) for c in clients)
    assert clients.min() >= 0
    assert clients.max() < count
    assert np.mean(clients) == pytest.approx(count / 2, rel=0.02)
    if cohorts.mask is not None:
        sizes = np.asarray(cohorts.mask).sum(1)
        assert np.mean(sizes) == pytest.approx(50, rel=0.05)
        assert np.std(sizes) == pytest.approx(50**0.5, rel=0.2)


def test_a_partial_shuffle_has_every_order_equally_often():
    draw = jax.jit(jax.vmap(lambda key: sampling._distinct(key, 4, 3)))
    rows = np.asarray(draw(jax.random.split(jax.random.key(0), 12_000)))
    orders, counts = np.unique(rows, axis=0, return_counts=True)
    assert len(orders) == 24
    expected = 12_000 / 24
    assert np.sum((counts - expected) ** 2 / expected) < 49.7  # chi-square, 23, 1 in 1,000
