"""Fine-tuning from a classifier in closed form: frozen parts, temperatures, other runs' models."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_ridge as ref
from conftest import Problem, assert_close, assert_same_bits, small_config

import fedjax_flat as ff
from fedjax_flat import cli, parts, testing
from fedjax_flat.engine.round import traffic
from fedjax_flat.report.probe import probe
from fedjax_flat.report.temperature import temperature
from fedjax_flat.tasks import cross_entropy

HEAD = 5 * 3 + 3  # of the problem's network
REST = 16 * 5 + 5


CASES = [(name, *part) for name in ("fedavg", "fedavgm", "scaffold")
         for part in (("head", "classifier", REST), ("features", "Dense_0", HEAD))]


@pytest.mark.parametrize(
    ("name", "frozen", "still", "sent"),
    [pytest.param(*case, marks=() if case[:2] in (("fedavg", "head"), ("scaffold", "features"))
                  else pytest.mark.slow) for case in CASES],
)
def test_what_is_frozen_keeps_its_bits_and_is_not_sent(name, frozen, still, sent):
    problem = Problem()
    algorithm = testing.algorithm_of(name, problem.task, {"client.frozen": frozen})
    run = testing.Run(algorithm, problem, rounds=2)
    before, after = problem.params, run.model.params
    assert_same_bits(before[still], after[still])
    (other,) = {"classifier", "Dense_0"} - {still}
    assert (before[other]["kernel"] != after[other]["kernel"]).any()
    models = 2 if name == "scaffold" else 1
    assert traffic(algorithm, run.states[0], run.data) == (32 * models * sent,) * 2


@pytest.mark.slow
def test_control_variates_of_what_is_frozen_are_zero():
    problem = Problem()
    settings = {"client.frozen": "params/Dense_0/*", "algorithm.scaffold.option": 1}
    run = testing.Run(testing.algorithm_of("scaffold", problem.task, settings), problem, rounds=1)
    assert not np.asarray(run.states[1].server.control["Dense_0"]["kernel"]).any()
    assert np.asarray(run.states[1].server.control["classifier"]["kernel"]).any()


@pytest.mark.parametrize(
    ("frozen", "message"),
    [("params/Conv_*", "a frozen part that is empty.*params/Dense_0/kernel"),
     ("haed", "unknown part of a model 'haed'.*Did you mean 'head'"),
     ("params/*", "leaves nothing to train")],
)
def test_parts_that_cannot_be_frozen(frozen, message):
    problem = Problem()
    with pytest.raises(ff.UsageError, match=message):
        problem.run(testing.algorithm_of("fedavg", problem.task, {"client.frozen": frozen}), 1)


def test_parts_by_name():
    names = ["params/stem/Conv_0/kernel", "params/classifier/kernel", "stats/batch_stats/a/mean"]
    chosen = lambda text: [n for n in names if parts.named(text)(n)]
    assert parts.named("none") is None
    assert chosen("head") == names[1:2]
    assert chosen("features") == [names[0], names[2]]
    assert chosen("params/stem/*,stats/*") == [names[0], names[2]]
    assert parts.either(None, None) is None
    assert parts.either(None, parts.head) is parts.head


def test_logits_are_divided_by_the_temperature():
    problem = Problem()
    cool = ff.tasks.classification(
        problem.model, ff.data.preprocess(problem.dataset), temperature=0.1
    )
    examples = jax.tree.map(jnp.asarray, problem.dataset.train)
    batch = problem.task.prepare(ff.data.Batch(*examples, jnp.ones(37, bool)), None)
    logits = problem.task.forward(problem.variables, batch, None).logits
    outputs = cool.forward(problem.variables, batch, jax.random.key(0))
    assert_close(outputs.logits, 10 * logits, 1e-5)
    expected = jnp.sum(cross_entropy(10 * logits, batch.labels))
    assert_close(cool.measure(outputs, batch)["loss"], expected, 1e-5)
    with pytest.raises(ff.UsageError, match="temperature = 0: expected more than 0"):
        ff.tasks.classification(problem.model, None, temperature=0)
    with pytest.raises(ff.UsageError, match=r"temperature = -1\.0: expected more than 0"):
        ff.validate(small_config(task__temperature=-1))


def config_of(**settings):
    """Short runs of a small network with BatchNorm, whose features are not trivial."""
    given = {
        "rounds": 2, "eval__every": 1, "eval__window": 1, "cohort__size": 10,
        "model__hidden": (24,), "model__norm": "batch", "client__learning_rate": 0.01, **settings,
    }
    return ff.only_used(small_config(**given))


def closed(**settings):
    return config_of(algorithm__name="fed3r", cohort__sampling="once", data__features=True,
                     client__batch_size=100, **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of Fed3R on features, `fed3r`, and a cache."""
    folder = tmp_path_factory.mktemp("finetune")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDJAX_FLAT_CACHE", str(folder / "cache"))
        ff.train(closed(), folder / "fed3r", progress=False)
        yield folder


def accuracy(result, round):
    (found,) = [r for r in result.records if r["split"] == "test" and r["round"] == round]
    return found["accuracy"]


@pytest.fixture(scope="module")
def tuned(folder):
    """FT of the features from Fed3R's classifier."""
    config = config_of(client__frozen="head", task__temperature=0.1)
    return ff.train(config, folder / "tuned", init=folder / "fed3r", progress=False)


def test_fine_tuning_starts_where_fed3r_ended(folder, tuned):
    fed3r = ff.load_run(folder / "fed3r")
    assert accuracy(tuned, 0) == pytest.approx(
        json.loads((folder / "fed3r/metrics.jsonl").read_text().splitlines()[-1])["accuracy"],
        abs=0.003,
    )
    ended = tuned.models["global"].params
    assert_same_bits(ended["classifier"], fed3r.model().params["classifier"])
    fresh = ff.build(config_of()).init().server.model.params
    assert (fresh["Dense_0"]["kernel"] != ended["Dense_0"]["kernel"]).any()


@pytest.mark.slow
def test_it_resumes_without_the_run_it_is_from(folder, tuned):
    shutil.copytree(folder / "fed3r", folder / "gone")
    config = config_of(client__frozen="head", task__temperature=0.1)
    config.rounds = 1
    ff.train(config, folder / "half", init=folder / "gone", progress=False)
    shutil.rmtree(folder / "gone")
    config.rounds = 2
    again = ff.train(config, folder / "half", progress=False)
    assert_same_bits(again.models, tuned.models)
    with pytest.raises(ff.UsageError, match=r"began with the model of .*gone.*not with that of"):
        ff.train(config, folder / "half", init=folder / "fed3r", progress=False)
    with pytest.raises(ff.UsageError, match="began with its own model"):
        ff.train(closed(), folder / "fed3r", init=folder / "tuned", progress=False)


@pytest.mark.slow
def test_the_head_on_features_is_the_head_of_the_network_with_frozen_features(folder):
    """Bits differ, because the network runs in batches of other sizes."""
    settings = {"task__temperature": 0.1, "rounds": 1}
    on_features = ff.train(
        config_of(data__features=True, **settings), folder / "head", init=folder / "fed3r",
        progress=False,
    )
    frozen = ff.train(
        config_of(client__frozen="features", **settings), folder / "frozen",
        init=folder / "fed3r", progress=False,
    )
    heads = [r.models["global"].params["classifier"] for r in (on_features, frozen)]
    assert_close(*heads, 1e-4)
    start = ff.load_run(folder / "fed3r").model().params["classifier"]
    assert np.abs(heads[0]["kernel"] - start["kernel"]).max() > 5e-3, "it was trained"


@pytest.mark.parametrize(
    ("settings", "source", "message"),
    [
        ({"seed": 1}, "fed3r", r"reads features of other weights \(\w{12}, here \w{12}\)"),
        ({"model__hidden": (12,)}, "fed3r", r"classifier/kernel of shape \(24, 10\); here it is"),
        ({"data__features": True}, "tuned", r"has params/BatchNorm_0/bias .*this model lacks"),
        ({"model__norm": "none", "seed": 1}, "tuned", "which this model lacks"),
        ({"model__hidden": (24, 24)}, "tuned", "of shape|lacks params/"),
        ({}, "nowhere", "is not a run folder"),
    ],
)
def test_models_that_do_not_fit(folder, tuned, settings, source, message):
    with pytest.raises(ff.UsageError, match=message):
        ff.train(config_of(**settings), folder / "bad", init=folder / source, progress=False)
    shutil.rmtree(folder / "bad")


def test_probe_is_ridge_on_the_runs_features(folder, tuned):
    found = probe(folder / "tuned")
    run = ff.load_run(folder / "tuned")
    task, variables = run.experiment.task, run.model()

    @jax.jit
    def features(inputs):
        batch = ff.data.Batch(inputs, (), jnp.ones(inputs.shape[0], bool))
        return task.forward(variables, task.prepare(batch, None), None).features

    digits = ff.data.load("digits")
    x, tested = (np.asarray(features(s.inputs), float) for s in (digits.train, digits.test))
    kernel, _ = ref.normal_equations(x, digits.train.labels, 10, 0.01)
    expected = np.mean((tested @ kernel).argmax(1) == digits.test.labels)
    assert found["fed3r"] == pytest.approx(expected, abs=1e-6)
    assert found["classifier"] == pytest.approx(accuracy(tuned, 2), abs=1e-6)
    (path,) = (folder / "tuned/probe").glob("global_round*_ridge0.01.json")
    assert json.loads(path.read_text()) == found
    with pytest.raises(ff.UsageError, match="--random = 0: expected 1 or more"):
        probe(folder / "tuned", random=[0])


def test_temperatures(folder):
    losses, figure = temperature(folder / "fed3r", (0.05, 0.2, 1.0))
    assert figure.exists()
    run = ff.load_run(folder / "fed3r")
    x, y = run.experiment.train_examples
    w = run.model().params["classifier"]["kernel"]
    logits = np.asarray(x, float) @ np.asarray(w, float)
    for tau, loss in losses.items():
        z = logits / tau
        rows = np.log(np.exp(z - z.max(1, keepdims=True)).sum(1)) + z.max(1)
        expected = np.mean(rows - z[np.arange(len(z)), np.asarray(y)])
        assert loss == pytest.approx(expected, rel=1e-4)
    with pytest.raises(ff.UsageError, match=r"--tau = 0\.0: expected more than 0"):
        temperature(folder / "fed3r", (0.0,))


@pytest.mark.slow
def test_probe_of_a_run_on_features_and_on_random_ones(folder):
    found = probe(folder / "fed3r", random=[50], sigma=30.0)
    assert found["fed3r"] == pytest.approx(found["classifier"], abs=1e-6)
    assert 0.3 < found["fed3r_rf 50"] < 1


@pytest.mark.slow
def test_from_the_command_line(folder, tuned, capsys):
    path = folder / "c.py"
    path.write_text("from fedjax_flat import default_config as get_config\n")
    options = [f"--config.{n}={v}" for n, v in {
        "rounds": 1, "model.hidden": "(24,)", "model.norm": "batch", "client.frozen": "head"
    }.items()]
    command = ["train", "--config", str(path), "--run", str(folder / "cli"), "--quiet",
               "--init", str(folder / "fed3r"), *options]
    assert cli.main(command) == 0
    assert cli.main(["probe", str(folder / "cli"), str(folder / "tuned"), "--random", "20"]) == 0
    assert "fed3r_rf 20" in capsys.readouterr().out
    assert cli.main(["temperature", str(folder / "fed3r"), "--tau", "0.2", "--tau", "1"]) == 0
    assert "lowest: --config.task.temperature=" in capsys.readouterr().out
