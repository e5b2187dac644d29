"""FedVC's virtual clients: against NumPy, in a run, and wrong input."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import reference_sequence as seq
from conftest import Problem, small_config
from test_sequence import KEY, SIZES, Run, fedavg, flat, in_numpy, problem

import fedjax_flat as ff
from fedjax_flat import experiment, testing
from fedjax_flat.data import Partition
from fedjax_flat.data.federated import shuffled_positions
from fedjax_flat.data.partition import virtual_clients
from fedjax_flat.data.partition.resize import shuffled
from fedjax_flat.engine import sampling
from fedjax_flat.run import flatness


@pytest.mark.parametrize("size", [1, 3, 4, 40])
def test_clients_are_cut_and_repeated_as_numpys(size):
    whole = Partition.of([np.arange(0, 7), np.arange(7, 9), [], np.arange(9, 12)])
    found = virtual_clients(whole, size, seed=3)
    order = shuffled(whole, np.random.default_rng([3, 20]))
    made = seq.virtual_clients([order.client(k) for k in range(4)], size)
    assert [found.client(v).tolist() for v in range(found.num_clients)] == [
        examples.tolist() for _, examples in made
    ]
    assert set(found.indices) == set(range(12))
    assert (found.sizes == size).all()
    if size == 3:
        assert [k for k, _ in made] == [0, 0, 0, 1, 3], "larger clients are several"


def test_a_round_is_numpys():
    """FedAvg over virtual clients of 4: the plain mean, whatever clients had before."""
    size = 4
    made = virtual_clients(problem().partition, size)
    data = ff.data.federate(problem().dataset.train, made)
    sampler = ff.uniform(made.num_clients, 5)
    run = Run(fedavg(), data, sampler, 2)
    cohorts = [np.asarray(sampling.draw(sampler, KEY, jnp.int32(t)).clients).tolist()
               for t in range(2)]
    drawn = iter([(t, v) for t in range(2) for v in cohorts[t]])

    def train(w, v):
        t, expected = next(drawn)
        assert v == expected
        key = ff.rng.fold(KEY, "client", t, v)
        orders = [np.asarray(shuffled_positions(ff.rng.fold(key, "shuffle", e), size, size))
                  for e in range(testing.EPOCHS)]
        batches = [made.client(v)[order] for order in orders]
        return in_numpy().train(w, batches, in_numpy().grad)

    expected = seq.fedvc(flat(problem().variables), train, cohorts)
    for ours, theirs in zip(run.models, expected, strict=True):
        np.testing.assert_allclose(flat(ours), theirs, atol=2e-5 * np.abs(theirs).max())


def test_clients_of_that_size_stay_as_they_are():
    one = Problem((4, 4, 4))
    made = virtual_clients(one.partition, 4)
    assert [sorted(made.client(k)) for k in range(3)] == [
        sorted(one.partition.client(k)) for k in range(3)
    ]


@functools.cache
def built():
    return experiment.build(small_config(
        partition__virtual=16, partition__alpha=0.5, partition__size_sigma=1.0, cohort__size=4
    ))


def test_an_experiment_draws_virtual_clients():
    """The owners in the run folder are whole clients."""
    sizes = built().partition.sizes
    assert len(sizes) == 20
    assert sizes.max() > 16 > sizes.min()
    assert built().members == built().data.num_clients == int(np.ceil(sizes / 16).sum())
    np.testing.assert_array_equal(
        built().data.indices, virtual_clients(built().partition, 16).indices
    )
    cohort, _ = built().cohort_of(KEY, jnp.int32(0))
    assert len(set(np.asarray(cohort).tolist())) == 4
    np.testing.assert_array_equal(flatness.chosen_clients(built(), 2), [0, 1])


@pytest.mark.slow
def test_on_the_host_as_on_the_device(tmp_path):
    settings = {"partition__virtual": 16, "cohort__size": 4, "rounds": 2}
    a = ff.train(small_config(**settings), tmp_path / "a", progress=False)
    b = ff.train(small_config(**settings, data__placement="host"), tmp_path / "b", progress=False)
    testing.assert_same_bits(a.state, b.state)


@pytest.mark.parametrize(("settings", "message"), [
    ({"partition__virtual": -1}, "partition.virtual = -1: expected 0 or more"),
    ({"algorithm__name": "fedseq", "cohort__size": 2}, "does not go with algorithm.name = fedseq"),
    ({"data__local_test": 0.2}, "does not go with data.local_test, which is of whole clients"),
    ({"cohort__sampling": "sizes"}, "does not go with cohort.sampling = sizes"),
    ({"cohort__size": 10_000}, "a cohort of 10000 from"),
])
def test_wrong(settings, message):
    with pytest.raises(ff.UsageError, match=message):
        experiment.build(small_config(**{"partition__virtual": 16, **settings}))


def test_nothing_to_cut():
    with pytest.raises(ff.UsageError, match=r"partition.virtual = 0: expected 1 example or more"):
        virtual_clients(problem().partition, 0)
    with pytest.raises(ff.UsageError, match="clients without examples"):
        virtual_clients(Partition.of([[], []]), 4)
    assert sum(SIZES) == problem().partition.indices.size
