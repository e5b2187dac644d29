"""A member of a cohort may be a group of clients, which train one after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Problem, assert_close, assert_same_bits

import fedjax_flat as ff
from fedjax_flat.data import Partition

SIZES = (6, 3, 0, 9, 5)


def grouped(lists):
    problem = Problem(SIZES)
    problem.alone = problem.data
    problem.data = ff.data.grouped(problem.data, Partition.of(lists))
    return problem


def test_two_clients_in_sequence():
    """The second goes on from the first one's model; the group's difference is to the anchor."""
    problem = grouped([[3, 0], [4, 2, 1]])
    client = problem.client(lr=0.1, epochs=2)
    key = jax.random.key(5)
    train = jax.jit(client.train)
    for group, members in enumerate(((3, 0), (4, 2, 1))):
        data = problem.data.client(jnp.int32(group))
        assert int(data.size) == sum(SIZES[k] for k in members)
        together = train(problem.variables, data, key, round=jnp.int32(0))
        model, steps = problem.variables, 0
        for k in members:
            if SIZES[k] == 0:
                continue
            own = problem.alone.client(jnp.int32(k))
            one = train(model, own, ff.rng.fold(key, k), round=jnp.int32(0))
            model, steps = one.variables, steps + int(one.info.steps)
        assert_close(together.variables, model, 1e-6)
        assert int(together.info.steps) == steps
        assert float(together.info.sums["examples"]) == 2 * sum(SIZES[k] for k in members)
        assert float(client.steps(data)) == steps


@pytest.mark.parametrize("strategy", ["map", "vmap"])
def test_a_round_of_groups(strategy):
    """Groups weigh as much as all their examples; a group of one client is that client."""
    problem = grouped([[3, 0], [4]])
    state, info = problem.run(problem.fedavg(lr=0.1), 1, strategy=strategy)
    assert float(info.clients) == 2
    assert float(info.examples) == 9 + 6 + 5
    train = jax.jit(problem.client(lr=0.1).train)
    key = ff.rng.fold(jax.random.key(0), "client", 0)

    def end(g):
        order = ff.rng.fold(jax.random.key(0), "group", 0, g, "order")
        data = problem.data.client(jnp.int32(g))
        data = data.replace(group=data.group.shuffled(order))
        return train(problem.variables, data, key, round=jnp.int32(0)).variables

    ends = [end(0), end(1)]
    expected = jax.tree.map(lambda a, b: (15 * a + 5 * b) / 20, *ends)
    assert_close(state.server.model, expected, 1e-6)


def test_groups_of_one_are_the_clients():
    problem = grouped([[0], [1], [2], [3], [4]])
    ours = problem.data.client(jnp.int32(3))
    alone = problem.alone.client(jnp.int32(3))
    count = lambda data: ff.data.over(lambda b: jnp.sum(b.mask), data, 4)
    assert int(count(ours)) == int(count(alone)) == 9


def test_evaluation_and_state_are_of_groups():
    problem = grouped([[3, 0], [4, 1]])
    sums = ff.client_evaluator(problem.task, 4)(problem.variables, problem.data)
    np.testing.assert_array_equal(sums["examples"], [15, 8])
    scaffold = ff.testing.algorithm_of("scaffold", problem.task)
    state, _ = problem.run(scaffold, 1, sampler=ff.uniform(2, 1))
    moved = [max(float(jnp.abs(x[g]).max()) for x in jax.tree.leaves(state.clients))
             for g in (0, 1)]
    assert sorted(m > 0 for m in moved) == [False, True]
    again, _ = problem.run(scaffold, 1, sampler=ff.uniform(2, 1))
    assert_same_bits(state, again)


@pytest.mark.parametrize(
    ("lists", "message"),
    [([[0, 1], [1]], "client 1 to 2 groups"), ([[0, 7]], "points at client 7 of 5"),
     ([], "without a group")],
)
def test_wrong_groups(lists, message):
    with pytest.raises(ff.UsageError, match=message):
        grouped(lists)


def test_a_group_has_no_curvature_of_its_own():
    problem = grouped([[3, 0], [4, 1]])
    with pytest.raises(ff.UsageError, match="a group of clients"):
        ff.curvature.of_client(problem.task, problem.data, 0)
