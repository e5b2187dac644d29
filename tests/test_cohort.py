"""Cohort strategies give the same numbers; cohorts are fair and depend on the seed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Problem, assert_close

import fedjax_flat as ff
from fedjax_flat.engine import sampling
from fedjax_flat.engine.client_state import scatter
from fedjax_flat.engine.sampling import Cohort

SIZES = (7, 3, 12, 1, 9, 5, 8)


@pytest.mark.parametrize(("strategy", "chunk"), [
    ("map", 1), ("chunked", 3), *(pytest.param("chunked", n, marks=pytest.mark.slow)
                                  for n in (2, 7, 9)),
])
@pytest.mark.parametrize("sizes", [SIZES, (6,) * 7])
def test_strategies_agree(strategy, chunk, sizes):
    problem = Problem(sizes)
    algorithm = problem.fedavg(epochs=2)
    reference = problem.run(algorithm, 3, strategy="vmap")
    state, info = problem.run(algorithm, 3, strategy=strategy, chunk=chunk)
    assert_close(reference[0].server, state.server, 1e-6)
    assert_close(reference[1], info, 1e-6)


def test_uniform_cohorts_are_distinct_and_fair():
    sample = jax.jit(jax.vmap(ff.uniform(10, 3)))
    clients = np.asarray(sample(jax.random.split(jax.random.key(0), 4000)).clients)
    assert all(len(set(row)) == 3 for row in clients)
    share = np.bincount(clients.ravel(), minlength=10) / clients.size
    np.testing.assert_allclose(share, 0.1, atol=0.01)  # 4 standard errors
    pairs = np.mean([(0 in row) and (1 in row) for row in clients])
    assert pairs == pytest.approx(3 * 2 / (10 * 9), abs=0.02)


def test_bernoulli_cohorts_have_the_right_size_and_are_independent():
    sample = jax.jit(jax.vmap(ff.bernoulli(50, 10)))
    cohort = sample(jax.random.split(jax.random.key(0), 4000))
    counts = np.asarray(cohort.mask).sum(1)
    assert counts.mean() == pytest.approx(10, abs=4 * np.sqrt(8 / 4000))
    assert counts.var() == pytest.approx(8, rel=0.1)
    assert counts.max() < cohort.mask.shape[1], "a slot is always left"
    taken = np.asarray(cohort.clients)[np.asarray(cohort.mask)]
    np.testing.assert_allclose(np.bincount(taken, minlength=50) / 4000, 0.2, atol=0.03)


def test_bernoulli_with_every_client_is_full_participation():
    problem = Problem(SIZES)
    algorithm = problem.fedavg()
    everyone, _ = problem.run(algorithm, 2, sampler=ff.uniform(7, 7))
    drawn, info = problem.run(algorithm, 2, sampler=ff.bernoulli(7, 7))
    assert float(info.clients) == 7
    assert_close(everyone.server, drawn.server, 1e-6)


@pytest.mark.parametrize(("clients", "size"), [(20, 5), (20, 7), (3, 3), (5, 1)])
def test_once_is_every_client_in_a_pass_and_then_in_another_order(clients, size):
    schedule = ff.once(clients, size)
    rounds = -(-clients // size)
    draw = jax.jit(lambda seed, t: sampling.draw(schedule, jax.random.key(seed), t))

    def passed(seed, number):
        cohorts = [draw(seed, number * rounds + t) for t in range(rounds)]
        assert all(c.clients.shape == (size,) for c in cohorts)
        real = [c.clients if c.mask is None else c.clients[c.mask] for c in cohorts]
        return np.concatenate(real).tolist()

    for seed, number in ((0, 0), (0, 1), (1, 0)):
        assert sorted(passed(seed, number)) == list(range(clients))
    if clients == 20:
        assert passed(0, 0) != passed(0, 1), "another pass, another order"
        assert passed(0, 0) != passed(1, 0), "another seed, another order"
        assert passed(0, 0) == passed(0, 0)
    with pytest.raises(ff.UsageError, match=f"expected between 1 and {clients}"):
        ff.once(clients, clients + 1)


def test_cohorts_depend_on_seed_and_round():
    sample = ff.uniform(1000, 10)
    draw = lambda seed, t: tuple(
        np.asarray(sample(ff.rng.fold(jax.random.key(seed), "cohort", t)).clients).tolist()
    )
    assert draw(0, 0) == draw(0, 0)
    assert len({draw(seed, t) for seed in range(5) for t in range(5)}) == 25


def test_scatter_touches_only_the_clients_that_took_part():
    rows = jnp.arange(5.0)
    cohort = Cohort(jnp.array([3, 1, 0]), jnp.array([True, True, False]))
    written = scatter(rows, cohort, jnp.array([30.0, 10.0, -1.0]))
    np.testing.assert_array_equal(written, [0.0, 10.0, 2.0, 30.0, 4.0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ff.uniform(10, 11), "cohort of 11 from 10 clients"),
        (lambda: ff.uniform(10, 0), "between 1 and 10"),
        (lambda: ff.bernoulli(10, 11), "expected cohort of 11"),
        (lambda: ff.cohort_map("vmpa"), "Did you mean 'vmap'"),
        (lambda: ff.cohort_map("chunked", chunk=-1), "expected 0 or more"),
    ],
)
def test_wrong_inputs(make, message):
    with pytest.raises(ff.UsageError, match=message):
        make()
