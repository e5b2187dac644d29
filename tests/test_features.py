"""Features instead of examples: the same numbers, computed once, and never those of others."""

import json
import pathlib

import jax
import numpy as np
import pytest
from conftest import assert_same_bits, small_config

import fedjax_flat as ff
from fedjax_flat.experiment import features


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("FEDJAX_FLAT_CACHE", str(folder))
    return folder


def config_of(**settings):
    given = {
        "algorithm__name": "fed3r", "cohort__sampling": "once", "rounds": 2, "eval__every": 2,
        "eval__window": 1, "model__hidden": (24,), "client__batch_size": 100, **settings,
    }
    return small_config(**given)


def kernel(result):
    return np.asarray(result.models["global"].params["classifier"]["kernel"])


def never(*args):
    raise AssertionError("the network runs again")


def test_they_are_what_the_network_says_and_are_computed_once(cache, tmp_path, monkeypatch):
    seen = ff.train(config_of(data__features=True), tmp_path / "a", progress=False)
    ran = ff.train(config_of(), tmp_path / "b", progress=False)
    assert np.abs(kernel(seen) - kernel(ran)).max() < 1e-5
    assert set(seen.models["global"].params) == {"classifier"}
    accuracy = [r.score(1)[0] for r in (seen, ran)]
    assert accuracy[0] == pytest.approx(accuracy[1], abs=0.003)
    assert len(list(cache.glob("features-*.npy"))) == 2

    monkeypatch.setattr(features.Extract, "run", property(lambda self: never))
    other = config_of(
        data__features=True, algorithm__name="fedavg", partition__alpha=0.1, cohort__size=5,
    )
    built = ff.build(other)
    assert isinstance(built.data.examples.inputs, jax.Array)
    network = ff.build(config_of())
    variables = network.init().server.model
    expected = network.task.forward(
        variables, network.task.prepare(ff.data.Batch(
            network.splits["test"].inputs[:7], np.zeros(7, int), np.ones(7, bool)), None), None
    ).features
    np.testing.assert_allclose(built.splits["test"].inputs[:7], expected, atol=1e-6)
    np.testing.assert_array_equal(built.splits["test"].labels, network.splits["test"].labels)

    host = ff.build(config_of(data__features=True, data__placement="host"))
    assert isinstance(host.data.examples.inputs, np.memmap), "they stay in their file"
    again = ff.train(config_of(data__features=True), tmp_path / "c", progress=False)
    assert_same_bits(again.models, seen.models)


def test_a_run_goes_on_with_the_same_features_only(cache, tmp_path, monkeypatch):
    config = config_of(data__features=True, algorithm__name="fedncm")
    ff.train(config, tmp_path / "a", progress=False)
    config.rounds = 3
    ff.train(config, tmp_path / "a", progress=False)
    known = ff.load_run(tmp_path / "a").folder.features()
    assert known == features.Features(**json.loads((tmp_path / "a/features.json").read_text()))
    monkeypatch.setattr(features, "weights_digest", lambda variables: "f" * 64)
    for attempt in (lambda: ff.train(config, tmp_path / "a", progress=False),
                    lambda: ff.load_run(tmp_path / "a")):
        with pytest.raises(ff.UsageError, match=r"features of other weights: model.pretrained.*ff"):
            attempt()


def test_a_file_under_another_name_is_refused(cache):
    config = config_of(data__features=True)
    ff.build(config)
    labels = sorted(cache.glob("*.json"))
    first, second = (json.loads(p.read_text()) for p in labels)
    assert first["weights"] == second["weights"]
    assert first["inputs"] != second["inputs"]
    labels[0].write_text(json.dumps(first | {"weights": "0" * 64}))
    with pytest.raises(ff.UsageError, match="holds features of other weights than its name says"):
        ff.build(config)


def test_other_weights_data_and_preprocessing_have_other_names(tmp_path):
    """The digest has every bit that decides features, and nothing of the classifier."""
    variables = ff.models.Variables(
        {"Dense_0": {"kernel": np.ones((2, 3), np.float32)},
         "classifier": {"kernel": np.ones((3, 4), np.float32)}}
    )
    digest = features.weights_digest(variables)
    changed = jax.tree.map(np.copy, variables)
    changed.params["classifier"]["kernel"][0] = 7
    assert features.weights_digest(changed) == digest
    changed.params["Dense_0"]["kernel"][1, 2] = np.nextafter(np.float32(1), np.float32(2))
    assert features.weights_digest(changed) != digest

    x = np.arange(12, dtype=np.uint8).reshape(4, 3)
    digest = features.inputs_digest
    assert digest(x) == digest(x.copy()) != digest(x[::-1])
    assert digest(x) != digest(x.reshape(3, 4))
    np.save(tmp_path / "x.npy", x)
    mapped = lambda: np.load(tmp_path / "x.npy", mmap_mode="r")
    first = features.inputs_digest(mapped())
    assert first == features.inputs_digest(mapped()) != features.inputs_digest(x)
    np.save(tmp_path / "x.npy", np.concatenate([x, x]))
    assert features.inputs_digest(mapped()) != first


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data__shift__name": "noise"}, "does not go with data.shift.name = 'noise'"),
        ({"data__flip": True, "algorithm__name": "fedavg"}, "features are computed once"),
        ({"model__norm": "batch", "model__statistics": "own", "algorithm__name": "fedavg"},
         "features are computed once"),
    ],
)
def test_what_does_not_go_with_them(settings, message):
    with pytest.raises(ff.UsageError, match=message):
        ff.validate(config_of(data__features=True, **settings))


def test_without_a_data_folder_they_are_in_the_home(cache, monkeypatch, tmp_path):
    monkeypatch.delenv("FEDJAX_FLAT_CACHE")
    monkeypatch.delenv("FEDJAX_FLAT_DATA", raising=False)
    monkeypatch.setattr(pathlib.Path, "home", classmethod(lambda cls: tmp_path))
    ff.build(config_of(data__features=True))
    assert len(list((tmp_path / ".cache").rglob("*.npy"))) == 2
