"""Curvature and landscapes of run folders, from the command line."""

import json
import os
import pathlib
import re

import jax
import numpy as np
import pytest
from conftest import assert_same_bits, small_config

import fedjax_flat as ff
from fedjax_flat import cli
from fedjax_flat.experiment import config
from fedjax_flat.report import analysis, results


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three short runs that differ in their seed; the first keeps state for clients, and SWA."""
    folder = tmp_path_factory.mktemp("runs")
    made = []
    for seed, name in enumerate(("scaffold", "fedavg", "fedavg")):
        config = small_config(seed=seed, rounds=2, algorithm__name=name)
        if seed == 0:
            config.server.average, config.server.swa.cycle = "swa", 1
        ff.train(config, folder / f"run{seed}", progress=False)
        made.append(str(folder / f"run{seed}"))
    return made


def test_curvature(runs, capsys):
    assert cli.main(["curvature", runs[0], "--top", "5", "--examples", "100", "--trace", "3",
                     "--density", "1"]) == 0
    shown = capsys.readouterr().out
    base = next(iter((pathlib.Path(runs[0]) / "curvature").glob("*.json")))
    summary = json.loads(base.read_text())
    assert (summary["split"], summary["examples"], summary["model"]) == ("train", 100, "global")
    assert summary["lambda_1"] >= summary["lambda_5"]
    assert f"{summary['lambda_1']:.4g}" in shown
    with np.load(base.with_suffix(".npz")) as arrays:
        assert len(arrays["eigenvalues"]) == len(arrays["estimates"]) == 5
        assert arrays["residuals"][0] == summary["residual_1"] > arrays["estimates"][0]
        assert arrays["weights"].sum() == pytest.approx(1, abs=1e-5)
    assert base.with_suffix(".png").stat().st_size > 1000
    power = analysis.spectrum(runs[0], top=1, examples=100, method="power", model="swa")
    assert power["model"] == "swa"
    assert power["lambda_1"] > 0


def test_several_runs_are_one_table(runs, capsys):
    assert cli.main(["curvature", *runs[:2], "--examples", "64"]) == 0
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["run", "model", "round", "loss", "lambda_1", "lambda_5",
                              "lambda_1/lambda_5", "converged"]
    assert [row.split()[0] for row in rows] == runs[:2]


def forget(run):
    for path in (pathlib.Path(run) / "curvature").glob("*.npz"):
        path.unlink()


def test_what_is_finished_is_not_computed_again(runs, monkeypatch):
    forget(runs[2])
    options = {"top": 2, "examples": 64}
    first = analysis.spectrum(runs[2], **options)
    monkeypatch.setitem(analysis.METHODS, "lanczos", None)  # would be called
    again = analysis.spectrum(os.path.relpath(runs[2]), **options)
    assert again == first | {"run": os.path.relpath(runs[2]), "figure": again["figure"]}
    assert "trace" not in again
    more = analysis.spectrum(runs[2], **options, trace_probes=2)
    assert (more["lambda_1"], more["trace_probes"]) == (first["lambda_1"], 2)
    (path,) = (pathlib.Path(runs[2]) / "curvature").glob("*.npz")
    assert f"_round{first['round']}_" in path.name
    with pytest.raises(TypeError):
        analysis.spectrum(runs[2], **options, seed=1)


def test_stopped_eigenvalues_go_on(runs, monkeypatch, capsys):
    whole = analysis.spectrum(runs[1], top=3, examples=64)
    forget(runs[1])
    append, calls = analysis.Journal.append, []

    def append_then_stop(self, *step):
        append(self, *step)
        calls.append(step)
        if len(calls) == 7:
            raise KeyboardInterrupt

    monkeypatch.setattr(analysis.Journal, "append", append_then_stop)
    command = ["curvature", runs[1], "--top", "3", "--examples", "64"]
    assert cli.main(command) == 130
    assert "same command goes on" in capsys.readouterr().err
    folder = pathlib.Path(runs[1]) / "curvature"
    assert len(list(folder.glob(".partial*"))) == 2
    with open(next(folder.glob(".partial*.vectors")), "ab") as file:
        file.write(b"half a vector, as a killed process leaves it")
    size = ff.models.num_parameters(ff.load_run(runs[1]).model())

    def append_and_look(self, *step):
        append(self, *step)
        calls.append(step)
        assert self.vectors.stat().st_size == 4 * size * len(calls)

    monkeypatch.setattr(analysis.Journal, "append", append_and_look)
    assert analysis.spectrum(runs[1], top=3, examples=64) == whole
    assert len(calls) + 3 == whole["products"], "3 for residuals, none twice"
    assert not list(folder.glob(".partial*"))


def test_one_changed_float_does_not_change_an_eigenvalue(runs, monkeypatch):
    whole = analysis.spectrum(runs[1], top=3, examples=64)
    forget(runs[1])
    append, calls = analysis.Journal.append, []

    def append_then_stop(self, *step):
        append(self, *step)
        calls.append(step)
        if len(calls) == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(analysis.Journal, "append", append_then_stop)
    with pytest.raises(KeyboardInterrupt):
        analysis.spectrum(runs[1], top=3, examples=64)
    (numbers,) = (pathlib.Path(runs[1]) / "curvature").glob(".partial-*.jsonl")
    lines = numbers.read_text().split("\n")
    lines[4] = json.dumps([220.0, *json.loads(lines[4])[1:]])
    numbers.write_text("\n".join(lines))
    with pytest.warns(UserWarning, match="step 4 of 6 is damaged"):
        assert analysis.spectrum(runs[1], top=3, examples=64) == whole


def test_two_analyses_at_once(runs, capsys):
    folder = pathlib.Path(runs[1])
    done = int(ff.load_run(runs[1]).state.round)
    with results.locked(folder / "curvature" / f"global_round{done}_train64_lanczos3"):
        assert cli.main(["curvature", runs[1], "--top", "3", "--examples", "64"]) == 2
        assert "another process is computing" in capsys.readouterr().err
    with results.locked(folder / "landscape" / f"surface_global_round{done}_train64_3x3_r1_s0"):
        command = ["landscape", runs[1], "--surface", "--points", "3", "--examples", "64"]
        assert cli.main(command) == 2
        assert "another process is computing" in capsys.readouterr().err


@pytest.mark.slow
def test_double_precision_agrees(runs):
    found = [analysis.spectrum(runs[1], top=2, examples=64, precision=p)["lambda_1"]
             for p in ("float32", "float64")]
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert found[0] != found[1]


@pytest.mark.slow
def test_local_models_on_their_own_and_on_all_data(runs, capsys):
    assert cli.main(["curvature", runs[0], "--clients", "2", "--examples", "64"]) == 0
    shown = capsys.readouterr().out
    (path,) = (pathlib.Path(runs[0]) / "curvature").glob("clients*.json")
    rows = json.loads(path.read_text())
    assert [r["model"] for r in rows] == ["client 0", "client 1", "global"]
    for row in rows[:2]:
        assert f"{row['lambda_1, own data']:.4g}" in shown
        assert row["lambda_1, own data"] != row["lambda_1, all data"]
    one = analysis.spectrum(runs[0], client=1, split="own", top=1)
    assert one["lambda_1"] == pytest.approx(rows[1]["lambda_1, own data"], rel=0.02)
    command = ["landscape", "--surface", runs[0], "--client", "1", "--points", "3",
               "--examples", "64"]
    assert cli.main(command) == 0
    names = {p.name.split("_")[3] for p in (pathlib.Path(runs[0]) / "landscape").glob(
        "surface_client1_*.npz")}
    assert names == {f"own{rows[1]['examples']}", "train64"}


def test_surface_resumes_and_is_exact_at_its_centre(runs, monkeypatch):
    options = {"points": 3, "examples": 50}
    stop_after = iter([None])

    def save_then_stop(*args):
        save(*args)
        next(stop_after)  # the second row raises StopIteration, as a killed process would stop

    save = results.save
    monkeypatch.setattr(results, "save", save_then_stop)
    with pytest.raises(StopIteration):
        analysis.surfaces(runs[:1], **options)
    folder = pathlib.Path(runs[0]) / "landscape"
    with np.load(next(folder.glob("surface_global*.npz"))) as arrays:
        assert np.isnan(arrays["loss"]).sum() == 3, "two of three rows are there"
    assert not list(folder.glob("surface_global*.png")), "nothing half-drawn"
    monkeypatch.setattr(results, "save", save)
    figures = analysis.surfaces(runs[:2], **options)
    assert len(figures) == 5
    with np.load(next(folder.glob("surface_global*.npz"))) as arrays:
        grid = {k: arrays[k] for k in ("x", "y", "loss")}
    trained = ff.load_run(runs[0])
    means = analysis.loss_of(trained, "train", 50).means(trained.model().params)
    assert grid["loss"][1, 1] == float(means["loss"])
    path = next(folder.glob("surface_global*.npz"))
    with np.load(path) as arrays:
        changed = {**arrays, "loss": arrays["loss"] + 1}
    np.savez(path, **changed)
    with pytest.warns(UserWarning, match="damaged or of an earlier version: computed again"):
        analysis.surfaces(runs[:1], **options)
    with np.load(path) as arrays:
        np.testing.assert_array_equal(arrays["loss"], grid["loss"])
    html = next(folder.glob("*.html")).read_text()
    assert "plotly" in html.lower()
    assert 'src="http' not in html


def test_plane_and_line(runs, capsys):
    common = ["--points", "3", "--examples", "50"]
    assert cli.main(["landscape", "--plane", *runs, *common]) == 0
    assert cli.main(["landscape", "--line", *runs[:2], *common]) == 0
    assert "barrier:" in capsys.readouterr().out
    folder = pathlib.Path(runs[0]) / "landscape"
    for kind in ("plane", "line"):
        assert len(list(folder.glob(f"{kind}*.png"))) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["curvature", "RUN0", "--top", "100000"], "100000 eigenvalues of a Hessian of"),
        (["curvature", "RUN0", "--split", "tset"], "unknown split 'tset'.*'test'"),
        (["curvature", "RUN0", "--model", "wima"], "unknown model of .*'wima'"),
        (["curvature", "RUN0", "--method", "lanzcos"], "Did you mean 'lanczos'"),
        (["curvature", "RUN0", "--split", "own"], "say which, --client K"),
        (["curvature", "RUN0", "--client", "20"], "client 20: expected 0 to 19"),
        (["curvature", "EMPTY"], "not a run folder"),
        (["curvature", "UNTRAINED"], "has no checkpoint yet"),
        (["landscape", "--surface", "RUN0", "--points", "10"], "10 points has no centre"),
        (["landscape", "--plane", "RUN0", "RUN1"], "goes through three models; 2 given"),
        (["landscape", "--plane", "RUN0", "RUN1", "RUN0"], "lie on a line"),
        (["landscape", "--line", "RUN0"], "joins two models; 1 given"),
    ],
)
def test_wrong_inputs(runs, tmp_path, arguments, message, capsys):
    untrained = tmp_path / "untrained"
    untrained.mkdir()
    (untrained / "config.json").write_text(config.to_json(small_config()))
    names = {"RUN0": runs[0], "RUN1": runs[1], "EMPTY": str(tmp_path), "UNTRAINED": str(untrained)}
    assert cli.main([names.get(a, a) for a in arguments]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error


def test_client_state_of_a_run(runs):
    trained = ff.load_run(runs[0])
    row = trained.client_state(3)
    assert_same_bits(row, jax.tree.map(lambda x: x[3], trained.state.clients))
    with pytest.raises(ff.UsageError, match="client 20 of 20"):
        trained.client_state(20)
    with pytest.raises(ff.UsageError, match="fedavg, which keeps no state"):
        ff.load_run(runs[1]).client_state(0)
