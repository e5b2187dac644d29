"""Models as files: the same bits there and back, nothing executed, clear refusals."""

import io
import pickle

import flax
import numpy as np
import pytest
from conftest import assert_same_bits, small_config

import fedjax_flat as ff
from fedjax_flat import cli, parts
from fedjax_flat.experiment.phases import from_file
from fedjax_flat.models.weights import load_weights
from fedjax_flat.run.export import FORMS, export


def config_of(**settings):
    given = {"rounds": 2, "checkpoint__keep": 3, "model__hidden": (8,), "model__norm": "batch",
             "cohort__size": 2, **settings}
    return ff.only_used(small_config(**given))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "a"
    ff.train(config_of(), folder, progress=False)
    return folder


@pytest.fixture(scope="module")
def built():
    return ff.build(config_of(seed=5))


@pytest.mark.parametrize("form", FORMS)
def test_there_and_back_bit_for_bit(run, built, tmp_path, form):
    pytest.importorskip("safetensors")
    file = tmp_path / f"w.{form}"
    assert cli.main(["export", str(run), "--out", str(file)]) == 0
    trained = ff.load_run(run).model()
    assert load_weights(file).keys() == parts.take(trained, lambda name: True).keys()
    assert trained.stats
    assert_same_bits(built.models(from_file(built, file))["global"], trained)


def test_a_run_begins_with_a_file(run, tmp_path):
    (tmp_path / "bad.npz").write_bytes(b"no weights")
    with pytest.raises(ff.UsageError, match=r"expected .safetensors, .npz, .msgpack, or a torch"):
        ff.train(config_of(rounds=1), tmp_path / "b", init=tmp_path / "bad.npz", progress=False)
    file = export(run, out=tmp_path / "good.npz")
    ff.train(config_of(rounds=1), tmp_path / "b", init=file, progress=False)
    begun = ff.load_run(tmp_path / "b", round=0)
    assert begun.folder.init() == file
    assert_same_bits(begun.model(), ff.load_run(run).model())
    with pytest.raises(ff.UsageError, match=r"began with the model of .*--init counts before"):
        ff.train(config_of(rounds=1), tmp_path / "b", init=run, progress=False)


@pytest.mark.slow
def test_a_start_that_failed_leaves_no_trace(tmp_path):
    (tmp_path / "bad.npz").write_bytes(b"no weights")
    with pytest.raises(ff.UsageError, match="begins like none of these"):
        ff.train(config_of(rounds=1), tmp_path / "b", init=tmp_path / "bad.npz", progress=False)
    ff.train(config_of(rounds=1), tmp_path / "b", progress=False)
    assert ff.load_run(tmp_path / "b").folder.init() is None


def test_flax_reads_what_is_exported(run, capsys):
    assert cli.main(["export", str(run), "--to", "msgpack", "--round", "2"]) == 0
    file = run / "export" / "global_round2.msgpack"
    assert str(file) in capsys.readouterr().out
    tree = flax.serialization.msgpack_restore(file.read_bytes())
    assert_same_bits(tree["params"], ff.load_run(run, round=2).model().params)


@pytest.mark.parametrize(("arguments", "message"), [
    (["--to", "npy"], "unknown form 'npy': expected one of msgpack, npz, safetensors. Did you "),
    (["--model", "swa"], "unknown model of"),
    (["--round", "1"], "no checkpoint of round 1"),
    (["--out", "a.pt"], "unknown form 'pt'"),
])
def test_wrong_inputs(run, capsys, arguments, message):
    assert cli.main(["export", str(run), *arguments]) == cli.EXIT_USAGE
    assert message in capsys.readouterr().err


def test_a_run_without_checkpoint(run, tmp_path, capsys):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "metrics.jsonl"):
        (bare / name).write_bytes((run / name).read_bytes())
    assert cli.main(["export", str(bare)]) == cli.EXIT_USAGE
    assert "has no checkpoint yet: train it first" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path / "none")]) == cli.EXIT_USAGE
    assert "is not a run folder" in capsys.readouterr().err


class Evil:
    def __reduce__(self):
        return print, ("executed",)


def npz(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


@pytest.mark.parametrize(("content", "message"), [
    (pickle.dumps({"a": Evil()}), "a pickle, but not one of torch|refused"),
    (npz(a=np.array([Evil()], object)), "damaged or cut short"),
    (flax.serialization.msgpack_serialize({"params": {"a": 3}}), "params/a is a int; expected"),
    (flax.serialization.msgpack_serialize({"params": {"a": np.zeros(9)}})[:-4], "cut short"),
    (flax.serialization.msgpack_serialize({"params": {"a": np.zeros(9)}}), "lack params/"),
    (b"no weights at all", "expected .safetensors, .npz, .msgpack, or a torch file"),
])
def test_files_that_cannot_be_begun_with(built, tmp_path, capsys, content, message):
    file = tmp_path / "weights"
    file.write_bytes(content)
    with pytest.raises(ff.UsageError, match=message):
        from_file(built, file)
    assert "executed" not in capsys.readouterr().out


def test_a_classifier_of_other_classes_is_fresh(run, built, tmp_path, caplog):
    arrays = load_weights(export(run, out=tmp_path / "all.npz"))
    arrays |= {"params/classifier/kernel": np.zeros((8, 7), np.float32),
               "params/classifier/bias": np.zeros(7, np.float32)}
    (tmp_path / "seven.npz").write_bytes(FORMS["npz"](arrays))
    with caplog.at_level("INFO", "fedjax_flat"):
        begun = built.models(from_file(built, tmp_path / "seven.npz"))["global"].params
    assert "2 of the model's arrays are not in" in caplog.text
    assert_same_bits(begun["Dense_0"], ff.load_run(run).model().params["Dense_0"])
    assert_same_bits(begun["classifier"], built.init().server.model.params["classifier"])
