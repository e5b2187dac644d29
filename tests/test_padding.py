"""A padded example, step or client changes no bit.

Client sizes are data here, not shapes: one executable serves every drawn case.
"""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Problem, assert_close, assert_same_bits
from hypothesis import strategies as st

import fedjax_flat as ff
from fedjax_flat.data.federated import shuffled_positions
from fedjax_flat.engine.sampling import Cohort

SETTINGS = hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
CLIENTS = 4
client_sizes = st.lists(st.integers(0, 9), min_size=CLIENTS, max_size=CLIENTS)


@functools.cache
def engine(strategy: str, slots: int):
    problem = Problem((15,) * CLIENTS)
    algorithm = problem.fedavg(epochs=2)

    def run(state, data, cohort):
        over = ff.cohort_map(strategy)
        step = ff.round_step(algorithm, lambda key: cohort, over, task=problem.task)
        for _ in range(2):
            state, info = step(state, data)
        return state.server, info

    state = ff.init_state(algorithm, problem.variables, CLIENTS, jax.random.key(0))
    return problem, functools.partial(jax.jit(run), state)


def train(sizes, *, max_size=9, clients=range(CLIENTS), mask=None, strategy="map"):
    """Two rounds in which the given clients take part, each with `sizes` of its 15 examples."""
    problem, run = engine(strategy, len(clients))
    data = problem.data.replace(
        sizes=jnp.array(sizes, jnp.int32), max_size=max_size, equal_sizes=False
    )
    mask = [True] * len(clients) if mask is None else mask
    return run(data, Cohort(jnp.array(clients, jnp.int32), jnp.array(mask)))


@pytest.mark.parametrize("strategy", ["map", "vmap"])
@SETTINGS
@hypothesis.given(sizes=client_sizes)
def test_more_padding_of_every_client(strategy, sizes):
    """Room for 15 examples instead of 9: more padded examples and more padded steps."""
    assert_same_bits(
        train(sizes, strategy=strategy), train(sizes, strategy=strategy, max_size=15)
    )


@SETTINGS
@hypothesis.given(mask=st.lists(st.booleans(), min_size=8, max_size=8), seed=st.integers(0, 2**31))
def test_what_is_in_the_padding(mask, seed):
    """Whatever a padded row holds, loss, counts and gradient keep their bits."""
    problem, grad = masked_gradient()
    noise = np.random.default_rng(seed)
    real = np.array(mask)
    stored = ff.data.Batch(
        np.asarray(problem.data.examples.inputs[:8]), np.asarray(problem.data.examples.labels[:8]),
        real,
    )
    other = stored._replace(
        inputs=np.where(real[:, None, None, None], stored.inputs,
                        noise.integers(0, 256, stored.inputs.shape, np.uint8)),
        labels=np.where(real, stored.labels, noise.integers(0, 3, 8, np.int32)),
    )
    result = grad(problem.params, stored)
    assert_same_bits(result, grad(problem.params, other))
    assert float(result[0][1]["examples"]) == real.sum()


@functools.cache
def masked_gradient():
    problem = Problem((8,))

    def loss(params, stored):
        batch = problem.task.prepare(stored, jax.random.key(0))
        outputs = problem.task.forward(ff.models.Variables(params), batch, jax.random.key(1))
        sums = problem.task.measure(outputs, batch)
        return problem.task.means(sums)["loss"], sums

    return problem, jax.jit(jax.value_and_grad(loss, has_aux=True))


@SETTINGS
@hypothesis.given(sizes=client_sizes)
def test_empty_clients_and_empty_slots(sizes):
    sizes = [*sizes[:3], 0]
    before = train(sizes, clients=[0, 1, 2])
    assert_same_bits(before, train(sizes, clients=[0, 1, 2, 3]))
    assert_same_bits(before, train(sizes, clients=[0, 1, 2, 0], mask=[True, True, True, False]))


@pytest.mark.parametrize("strategy", ["vmap", "map", "chunked"])
def test_a_round_without_clients_changes_nothing(strategy):
    server, info = train((3, 4, 0, 0), mask=[False] * 4, strategy=strategy)
    assert_same_bits(server.model.params, engine(strategy, 4)[0].params)
    assert bool(info.finite)
    assert float(info.clients) == 0


def test_equal_clients_take_the_static_path_to_the_same_numbers():
    """Not to the same bits: XLA may fuse a loop of known length differently."""
    problem = Problem((6, 6, 6))
    assert problem.data.equal_sizes
    static, _ = problem.run(problem.fedavg(epochs=2), 2)
    problem.data = problem.data.replace(equal_sizes=False)
    dynamic, _ = problem.run(problem.fedavg(epochs=2), 2)
    assert_close(static.server, dynamic.server, 1e-6)


def test_shuffle_is_a_permutation_that_padding_does_not_change():
    key = jax.random.key(3)
    short, long = shuffled_positions(key, 7, 7), shuffled_positions(key, 7, 20)
    np.testing.assert_array_equal(np.sort(short), np.arange(7))
    np.testing.assert_array_equal(short, long[:7])
    assert (np.asarray(long[7:]) >= 7).all()
    shuffle = jax.jit(jax.vmap(lambda key: shuffled_positions(key, 4, 4)))
    orders = np.asarray(shuffle(jax.random.split(key, 200)))
    assert len({tuple(order) for order in orders.tolist()}) == 24


def test_evaluation_ignores_padding():
    problem = Problem((11,))
    whole = ff.evaluator(problem.task, 11)(problem.variables, problem.data.examples)
    uneven = ff.evaluator(problem.task, 4)(problem.variables, problem.data.examples)
    assert float(uneven["examples"]) == 11
    assert_close(whole, uneven, 1e-6)
