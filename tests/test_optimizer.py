"""Client optimisers: any of optax, fresh in every round."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Problem, assert_close, small_config

import fedjax_flat as ff
from fedjax_flat import testing
from fedjax_flat.client.optimizer import named
from fedjax_flat.models import Variables


def by_hand(problem, optimizer, rounds):
    """One client, batches as drawn, optax called as its users do; a fresh state every round."""
    drawn = testing.drawn(problem, rounds=rounds, cohort=1, epochs=1)
    params = problem.params

    def loss(params, batch):
        stored = ff.data.Batch(*jax.tree.map(lambda x: x[batch], problem.data.examples),
                               jnp.ones(len(batch), bool))
        sums = problem.task.evaluate(Variables(params), stored)
        return sums["loss"] / sums["units"]

    with jax.numpy_dtype_promotion("standard"):
        for cohort in drawn.rounds:
            state = optimizer.init(params)
            for batch in cohort[0]:
                grads = jax.grad(loss)(params, jnp.asarray(batch))
                updates, state = optimizer.update(grads, state, params)
                params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (named("adam", 0.02), optax.adam(0.02)),
        (named("adamw", 0.02, "b1=0.8, weight_decay=0.1"),
         optax.adamw(0.02, b1=0.8, weight_decay=0.1)),
        (named("adagrad", 0.1), optax.adagrad(0.1)),
        (named("rmsprop", 0.02, "decay=0.8"), optax.rmsprop(0.02, decay=0.8)),
        (ff.client.sgd(0.1, momentum=0.9, nesterov=True),
         optax.sgd(0.1, momentum=0.9, nesterov=True)),
    ],
    ids=["adam", "adamw", "adagrad", "rmsprop", "nesterov"],
)
def test_agrees_with_optax(ours, theirs):
    problem = Problem((10,))
    state, _ = problem.run(problem.fedavg(client=ours), 2)
    assert_close(state.server.model.params, by_hand(problem, theirs, 2), 1e-5)


def test_by_settings(tmp_path):
    settings = {"client__optimizer": "adam", "client__options": "b1=0.8",
                "client__learning_rate": 0.01, "client__learning_rate_decay": 0.5}
    result = ff.train(small_config(rounds=2, **settings), tmp_path, progress=False)
    assert np.isfinite(result.score(1)[0])
    built = ff.build(small_config(**settings, client__sharpness="sam"))
    assert built.algorithm


@pytest.mark.parametrize("name", ["fedprox", "feddyn", "fedgloss", "mimelite"])
def test_with_corrections(name):
    """Methods whose equations do not count on SGD's steps train with Adam too."""
    problem = Problem((7, 4))
    algorithm = testing.algorithm_of(
        name, problem.task, {"client.optimizer": "adam", "client.learning_rate": 0.01}
    )
    run = testing.Run(algorithm, problem, rounds=2)
    assert bool(run.infos[-1].finite)
    gap = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), run.model.params, problem.params)
    assert max(jax.tree.leaves(gap)) > 1e-3
