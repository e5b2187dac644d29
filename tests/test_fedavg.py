"""FedAvg against NumPy, and its limits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from conftest import Problem, assert_close, assert_same_bits

import fedjax_flat as ff
from fedjax_flat import testing

SIZES = (7, 3, 12, 1, 9, 5)


def randomness(problem, **options):
    """The cohorts and batches that the engine draws, as lists."""
    return testing.drawn(problem, **options).rounds


def reference_data(problem):
    d = testing.drawn(problem, rounds=0, cohort=1)
    return d.x, d.y


@pytest.mark.parametrize("strategy", ["vmap", "map", "chunked"])
@pytest.mark.parametrize(
    ("local", "server"),
    [
        ({}, {}),
        ({"momentum": 0.9, "weight_decay": 0.01}, {}),
        ({}, {"server_lr": 0.5, "server_momentum": 0.9}),
    ],
)
def test_agrees_with_numpy(strategy, local, server):
    problem = Problem(SIZES)
    algorithm = problem.fedavg(
        client=ff.client.sgd(0.3, **local),
        epochs=2,
        server=optax.sgd(server.get("server_lr", 1.0), momentum=server.get("server_momentum")),
    )
    state, _ = problem.run(algorithm, 3, cohort=3, strategy=strategy)
    drawn = randomness(problem, rounds=3, cohort=3, batch_size=4, epochs=2)
    assert len({len(problem.partition.client(k)) for t in drawn for k in t}) > 2
    expected = reference.fedavg(
        reference.unpack(problem.params), *reference_data(problem), drawn, lr=0.3, **local, **server
    )
    for (w, b), (w_ref, b_ref) in zip(
        reference.unpack(state.server.model.params), expected, strict=True
    ):
        np.testing.assert_allclose(w, w_ref, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(b, b_ref, rtol=1e-5, atol=1e-6)


def test_batches_cover_each_epoch_once():
    problem = Problem(SIZES)
    for members in randomness(problem, rounds=2, cohort=6, batch_size=4, epochs=2):
        for k, batches in members.items():
            own = problem.partition.client(k)
            seen = np.sort(np.concatenate(batches))
            np.testing.assert_array_equal(seen, np.sort(np.concatenate([own, own])))


def gradient_descent(problem, steps, lr):
    layers = reference.unpack(problem.params)
    x, y = reference_data(problem)
    for _ in range(steps):
        grad = reference.mean_gradient(layers, x, y)
        layers = reference.combine(lambda w, g: w - lr * g, layers, grad)
    return layers


def largest_difference(params, layers):
    return max(
        np.abs(a - b).max()
        for pair, ref in zip(reference.unpack(params), layers, strict=True)
        for a, b in zip(pair, ref, strict=True)
    )


def test_one_client_with_full_batch_is_gradient_descent():
    problem = Problem((20,))
    state, _ = problem.run(problem.fedavg(batch_size=20, epochs=3), 4)
    assert largest_difference(state.server.model.params, gradient_descent(problem, 12, 0.3)) < 1e-6


def test_fedsgd_is_gradient_descent_exactly_when_weighted_by_size():
    """Report, task 1: one full-batch step per client, all clients."""
    problem = Problem(SIZES)
    central = gradient_descent(problem, 5, 0.3)
    by_size, _ = problem.run(problem.fedavg(batch_size=16), 5)
    uniform, _ = problem.run(problem.fedavg(batch_size=16, weighting="uniform"), 5)
    assert largest_difference(by_size.server.model.params, central) < 1e-6
    assert largest_difference(uniform.server.model.params, central) > 1e-3

    equal = Problem((6,) * 6)
    uniform, _ = equal.run(equal.fedavg(batch_size=16, weighting="uniform"), 5)
    assert largest_difference(uniform.server.model.params, gradient_descent(equal, 5, 0.3)) < 1e-6


def test_learning_rate_may_depend_on_the_round():
    problem = Problem((8, 8))
    schedule = lambda t: jnp.where(t < 1, 0.3, 0.0)
    once, _ = problem.run(problem.fedavg(lr=0.3), 1)
    twice, _ = problem.run(problem.fedavg(lr=schedule), 2)
    assert_same_bits(once.server.model.params, twice.server.model.params)


def test_weight_decay_acts_at_w():
    problem = Problem((4,))
    decay, lr = 0.1, 0.25
    with_decay, _ = problem.run(
        problem.fedavg(client=ff.client.sgd(lr, weight_decay=decay)), 1
    )
    without, _ = problem.run(problem.fedavg(client=ff.client.sgd(lr)), 1)
    start, end = problem.params, without.server.model.params
    expected = jax.tree.map(lambda v, w: v - lr * decay * w, end, start)
    assert_close(with_decay.server.model.params, expected, 1e-6)


@pytest.mark.parametrize("sizes", [(6, 6), (6, 3), (5, 9)])
def test_steps_instead_of_epochs(sizes):
    """Two steps of a 6-example client at batch 4 are one epoch; five are two epochs and a half."""
    problem = Problem(sizes)
    epochs = -(-np.array(sizes) // 4)
    whole, info = problem.run(problem.fedavg(epochs=1), 1)
    if len(set(epochs.tolist())) == 1:
        same, _ = problem.run(problem.fedavg(steps=int(epochs[0])), 1)
        assert_same_bits(whole.server, same.server)
    train = problem.client(lr=0.1, steps=5).train
    _, local, _ = jax.jit(train)(
        problem.variables, problem.data.client(jnp.int32(0)), jax.random.key(0), round=jnp.int32(0)
    )
    assert int(local.steps) == 5
    per_epoch = int(epochs[0])
    full, rest = divmod(5, per_epoch)
    assert float(local.sums["examples"]) == full * sizes[0] + min(4 * rest, sizes[0])
    assert float(info.examples) == sum(sizes)


def test_round_info_and_drift():
    """With one full-batch step per client, drift is lr * ||gradient||, and loss is that at w."""
    problem = Problem((6,))
    state, info = problem.run(problem.fedavg(batch_size=6), 1)
    grad = reference.mean_gradient(
        reference.unpack(problem.params), *reference_data(problem)
    )
    norm = np.sqrt(sum((g**2).sum() for pair in grad for g in pair))
    assert float(info.drift) == pytest.approx(0.3 * norm, rel=1e-5)
    sums = ff.evaluator(problem.task, 4)(problem.variables, problem.data.examples)
    means = problem.task.means(sums)
    assert float(info.report["loss"]) == pytest.approx(float(means["loss"]), rel=1e-6)
    assert float(info.report["accuracy"]) == float(means["accuracy"])
    assert int(state.round) == 1
