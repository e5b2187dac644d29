"""Curvature along training: what is recorded, of which models, and that it changes nothing."""

import jax
import jax.numpy as jnp
import methods
import numpy as np
import pytest
from conftest import assert_close, assert_same_bits, small_config

import fedjax_flat as ff
from fedjax_flat import curvature, experiment, only_used
from fedjax_flat.engine.round import local_models
from fedjax_flat.engine.sampling import Cohort
from fedjax_flat.report import figures
from fedjax_flat.run import flatness

MEASURED = {
    "rounds": 4, "curvature__every": 2, "curvature__clients": 2, "curvature__trace_probes": 2,
    "curvature__examples": 200, "server__average": "wima", "server__wima__window": 2,
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(run folder, result) of four rounds, measured every second."""
    folder = tmp_path_factory.mktemp("measured") / "run"
    return folder, ff.train(small_config(**MEASURED), folder, progress=False)


def of(result):
    return [r for r in result.records if "lambda_1" in r]


def test_records(measured):
    folder, result = measured
    names = [(r["round"], r["model"], r["split"]) for r in of(result)]
    each = [("client 0", "own"), ("client 0", "train"), ("client 1", "own"), ("client 1", "train")]
    assert names == [
        (done, model, split)
        for done in (0, 2, 4)
        for model, split in [("global", "train"), *([("wima", "train")] * (done > 0)), *each]
    ]
    built = experiment.build(small_config(**MEASURED))
    loss = curvature.of_examples(built.task, built.data.examples, limit=200)
    expected = flatness.of_model(loss, result.models["global"].params, trace_probes=2)
    last = next(r for r in of(result) if (r["round"], r["model"]) == (4, "global"))
    assert last == {"round": 4, "split": "train", "model": "global", **expected}
    assert expected["lambda_1"] > 0
    own = [r["lambda_1"] for r in of(result) if r["split"] == "own"]
    assert len(set(own)) == len(own), "every client and round has its own"
    ((_, local),) = flatness.client_models(built, result.state, [1])
    data = curvature.of_client(built.task, built.data, 1)
    assert own[-1] == flatness.of_model(data, local.params)["lambda_1"]
    assert figures.curvature_curves(result.records, folder / "c.png").stat().st_size > 5000


def test_measuring_changes_no_bit_and_may_begin_later(measured, tmp_path):
    _, result = measured
    plain = only_used(small_config(**{**MEASURED, "curvature__every": 0, "rounds": 2}))
    ff.train(plain, tmp_path / "a", progress=False)
    resumed = ff.train(small_config(**MEASURED), tmp_path / "a", progress=False)
    assert_same_bits(resumed.state, result.state)
    assert of(resumed) == [r for r in of(result) if r["round"] == 4]


@pytest.mark.parametrize("strategy", ["map", "vmap"])
@pytest.mark.slow
def test_a_local_model_is_what_the_server_takes_from_one_client(strategy):
    problem = methods.problem()
    algorithm = problem.fedavg(epochs=2)
    state, _ = problem.run(algorithm, 1)
    clients = jnp.array([2, 5], jnp.int32)
    over = ff.cohort_map(strategy)
    found = jax.jit(local_models(algorithm, over))(state, problem.data, clients)
    for i, client in enumerate((2, 5)):
        alone = lambda key, client=client: Cohort(jnp.array([client], jnp.int32), None)
        step = ff.round_step(algorithm, alone, over, task=problem.task)
        after, _ = jax.jit(step)(state, problem.data)
        assert_close(jax.tree.map(lambda x, i=i: x[i], found), after.server.model)


def test_every_method_that_trains_has_local_models():
    problem = methods.problem()
    for name in ("scaffold", "naivefedgloss"):
        algorithm = methods.algorithm_of(name)
        state = ff.init_state(algorithm, problem.variables, 7, jax.random.key(0))
        models = jax.jit(local_models(algorithm, ff.cohort_map("map")))
        found = models(state, problem.data, jnp.array([3], jnp.int32))
        moved = jax.tree.map(lambda x, w: float(jnp.abs(x[0] - w).max()), found, problem.variables)
        assert max(jax.tree.leaves(moved)) > 1e-4, name
        assert np.isfinite(jax.tree.leaves(moved)).all()


def test_methods_without_local_training(tmp_path):
    config = small_config(rounds=1, algorithm__name="fedsgd", curvature__every=1)
    ff.train(config, tmp_path / "a", progress=False)
    config.curvature.clients = 1
    with pytest.raises(ff.UsageError, match="fedsgd trains no local models"):
        ff.train(config, tmp_path / "b", progress=False)


@pytest.mark.parametrize(
    ("name", "value"), [("every", -1), ("depth", 1), ("clients", -2), ("examples", -5)]
)
def test_wrong_settings(name, value):
    config = small_config()
    config.curvature[name] = value
    with pytest.raises(ff.UsageError, match=f"curvature.{name} = {value}: expected"):
        ff.validate(config)
