"""Where client state lives: the same bits in host memory, and a refusal when it cannot fit."""

import jax
import jax.numpy as jnp
import methods
import pytest
from conftest import assert_same_bits, small_config

import fedjax_flat as ff
from fedjax_flat import experiment, memory
from fedjax_flat.engine import client_state
from fedjax_flat.memory import Memory

ROW = {"dual": jax.ShapeDtypeStruct((797_962,), jnp.float32)}  # the CNN
GB = 10**9


def test_host_memory_gives_the_same_bits():
    sampler = ff.bernoulli(7, 3)  # a cohort with empty slots
    problem = methods.problem()
    algorithm = methods.algorithm_of("scaffold")
    over = ff.cohort_map("map")
    step = jax.jit(ff.round_step(algorithm, sampler, over, task=problem.task))
    ends = []
    for where, kind in (("device", "device"), ("host", "pinned_host")):
        state = ff.init_state(
            algorithm, problem.variables, 7, jax.random.key(0), client_state_in=where
        )
        for _ in range(3):
            state, _ = step(state, problem.data)
            kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.clients)}
            assert kinds == {kind}
        ends.append(state)
    assert_same_bits(*ends)


@pytest.mark.parametrize(
    ("option", "clients", "free", "expected"),
    [
        ("auto", 100, Memory(16 * GB, 64 * GB), "device"),
        ("auto", 10_000, Memory(16 * GB, 128 * GB), "host"),
        ("auto", 10_000, Memory(None, 128 * GB), "device"),
        ("host", 100, Memory(16 * GB, 64 * GB), "host"),
    ],
)
def test_choice(option, clients, free, expected):
    assert client_state.choose(option, ROW, clients, free) == expected


@pytest.mark.parametrize(
    ("option", "free", "message"),
    [
        ("auto", Memory(16 * GB, 24 * GB), "3.2 MB each. needs 31.9 GB; 24.0 GB of host memory"),
        ("auto", Memory(None, 24 * GB), "3.2 MB each. needs 31.9 GB; 24.0 GB of device memory"),
        ("device", Memory(16 * GB, 128 * GB), "16.0 GB of device memory"),
        ("hots", Memory(None, GB), "Did you mean 'host'"),
    ],
)
def test_refusal(option, free, message):
    with pytest.raises(ff.UsageError, match=message):
        client_state.choose(option, ROW, 10_000, free)


def test_free_memory_is_plausible():
    found = memory.free()
    assert found.host > 10**8
    assert found.device is None or found.device > 10**8


@pytest.mark.slow
def test_training_with_state_on_the_host(tmp_path):
    config = small_config(algorithm__name="scaffold", rounds=2, cohort__client_state="host")
    ff.train(config, tmp_path, progress=False)
    config.rounds = 4
    resumed = ff.train(config, tmp_path, progress=False)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(resumed.state.clients)}
    assert kinds == {"pinned_host"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm__name": "scafold"}, "Did you mean 'scaffold'"),
        ({"algorithm__name": "feddyn", "server__optimizer": "adam"}, "is part of feddyn"),
        ({"algorithm__name": "fedgloss", "server__momentum": 0.9}, "is part of fedgloss"),
        ({"algorithm__name": "fedsmoo", "client__sharpness": "sam"}, "an ascent of its own"),
        ({"algorithm__name": "fedsgd", "client__sharpness": "asam"}, "take no local steps"),
        ({"algorithm__name": "fedsgd", "data__mixup": 1.0}, "fedsgd sees the examples as they are"),
        ({"algorithm__name": "fedadam", "server__optimizer": "yogi"}, "the name means adam"),
        ({"algorithm__name": "fedavgm", "server__optimizer": "yogi"}, "SGD with momentum"),
        ({"algorithm__name": "mime", "client__momentum": 0.5}, "mime.momentum"),
        ({"algorithm__name": "fedprox", "algorithm__fedprox__mu": -1.0}, "mu = -1.0"),
        ({"algorithm__name": "feddyn", "algorithm__feddyn__alpha": 0.0}, "alpha = 0.0"),
        ({"algorithm__name": "fedgloss", "algorithm__fedgloss__beta": -1.0}, "beta = -1.0"),
        ({"algorithm__name": "fedgloss", "algorithm__fedgloss__variant": "relased"}, "'released'"),
        ({"algorithm__name": "mime", "algorithm__mime__momentum": 1.0}, "momentum = 1.0"),
        ({"algorithm__name": "fedacg", "algorithm__fedacg__momentum": 1.5}, "momentum = 1.5"),
        ({"algorithm__name": "fedcm", "algorithm__fedcm__alpha": 0.0}, "alpha = 0.0"),
        ({"algorithm__name": "scaffold", "algorithm__scaffold__option": 3}, "option = 3"),
        ({"algorithm__name": "fedgh", "algorithm__fedgh__scope": "leyer"}, "'layer'"),
        ({"server__momentum": 1.0}, "less than 1"),
        ({"server__optimizer": "adam", "server__adaptive__tau": 0.0}, "tau = 0.0"),
    ],
)
def test_impossible_methods_are_refused(settings, message):
    with pytest.raises(ff.UsageError, match=message):
        experiment.build(small_config(**settings))


def test_another_number_of_clients_in_one_folder(tmp_path):
    config = small_config(algorithm__name="scaffold", rounds=1, partition__name="iid")
    ff.train(config, tmp_path, progress=False)
    config.partition.clients = 10
    with pytest.raises(ff.UsageError, match=r"partition.clients: 20 -> 10"):
        ff.train(config, tmp_path, progress=False)
