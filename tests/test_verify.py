"""Rounds once more: the same bits are told from others, and why they may differ is said."""

import contextlib
import json
import shutil

import jax
import numpy as np
import pytest
from conftest import small_config

import fedjax_flat as ff
from fedjax_flat import cli
from fedjax_flat.run.checkpoint import Checkpoints
from fedjax_flat.run.verify import verify


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify") / "a"
    config = small_config(rounds=6, checkpoint__keep=2, cohort__size=2, model__hidden=(8,),
                          eval__every=2, client__momentum=0.5)
    ff.train(ff.only_used(config), folder, progress=False)
    return folder


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "copy")


def test_the_same_bits(run, capsys):
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    assert cli.main(["verify", str(run), "--quiet"]) == 0
    out = capsys.readouterr().out
    assert "rounds 5 to 6 again\nrecords: 4 of 4 agree" in out
    assert "state after round 6: agrees" in out
    assert out.endswith("same bits\n")
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before, "only looked at"


@pytest.mark.slow
def test_from_the_beginning_some_rounds_only(run, copy):
    found = verify(copy, start=0, rounds=3, show=False)
    assert (found.start, found.end, found.records) == (0, 3, 4)
    assert found.same
    assert "state: not compared, as there is no checkpoint of round 3" in found.lines()


def test_a_record_that_was_changed(copy, capsys):
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    changed = next(r for r in lines if r["round"] == 5 and r["split"] == "cohort")
    changed["drift"] = float(np.nextafter(changed["drift"], 9))
    (copy / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    assert cli.main(["verify", str(copy), "--quiet"]) == 1
    out = capsys.readouterr().out
    assert "records: 3 of 4 agree\n  round 5, cohort, local: drift " in out
    assert "state after round 6: agrees" in out
    assert out.endswith("OTHER BITS\n")


def test_a_state_with_other_bits_and_other_kernels(copy):
    trained = ff.load_run(copy)
    bias = trained.state.server.model.params["classifier"]["bias"]
    other = jax.tree.map(lambda x: np.nextafter(x, 9) if x is bias else x, trained.state)
    shutil.rmtree(copy / "checkpoints" / "6")
    with contextlib.closing(Checkpoints(copy / "checkpoints")) as checkpoints:
        checkpoints.save(6, other)
    known = json.loads((copy / "environment.json").read_text())
    known |= {"kernels": "another", "devices": ["tpu:v9"]}
    known["versions"]["jax"] = "0.0.1"
    (copy / "environment.json").write_text(json.dumps(known))
    found = verify(copy, show=False)
    assert not found.same
    assert found.other_records == []
    (leaf,) = found.other_state
    assert "classifier/bias by up to" in leaf
    said = "\n".join(found.lines())
    assert "kernels: another, now " in said
    assert "devices: tpu:v9, now cpu:cpu" in said
    assert "jax: 0.0.1, now " in said


@pytest.mark.parametrize(("arguments", "message"), [
    (["--from", "3"], "--from 3: expected a round with a checkpoint after it, 0, 4. More are kept"),
    (["--from", "6"], "expected a round with a checkpoint after it"),
    (["--rounds", "-1"], "--rounds = -1: expected 0 or more"),
    (["--confg"], "unknown argument '--confg'"),
])
def test_wrong_inputs(run, capsys, arguments, message):
    assert cli.main(["verify", str(run), "--quiet", *arguments]) == cli.EXIT_USAGE
    assert message in capsys.readouterr().err


def test_folders_that_cannot_be_verified(copy, tmp_path, capsys):
    assert cli.main(["verify", str(tmp_path)]) == cli.EXIT_USAGE
    assert "is not a run folder" in capsys.readouterr().err
    (copy / "metrics.jsonl").write_text("")
    assert cli.main(["verify", str(copy), "--quiet", "--rounds", "1"]) == cli.EXIT_USAGE
    assert "has no record of rounds 5 to 5: there is nothing to compare" in capsys.readouterr().err
    shutil.rmtree(copy / "checkpoints")
    assert cli.main(["verify", str(copy)]) == cli.EXIT_USAGE
    assert "has no checkpoint yet: train it first" in capsys.readouterr().err


def test_a_run_that_began_with_another_keeps_too_little(copy, tmp_path, run, capsys):
    (copy / "init.json").write_text(json.dumps({"run": str(run)}))
    shutil.rmtree(copy / "checkpoints" / "4")
    assert cli.main(["verify", str(copy), "--quiet"]) == cli.EXIT_USAGE
    said = capsys.readouterr().err
    assert "began with another run's model, and keeps one checkpoint only" in said
