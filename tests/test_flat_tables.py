"""benchmarks/flat_tables.py: pieces of tiny runs, made once."""

import json
import pathlib
import runpy

import pytest
from conftest import small_config

import fedjax_flat as ff
from fedjax_flat.report import analysis, robustness
from fedjax_flat.run import flatness, metrics

TABLES = runpy.run_path(str(pathlib.Path(__file__).parents[1] / "benchmarks" / "flat_tables.py"))
SWA = {"server__average": "swa", "server__swa__start": 3.0, "server__swa__cycle": 1}


def train(folder, name, start_from=None, **settings):
    config = small_config(rounds=4, checkpoint__every=1, checkpoint__keep=9, **settings)
    ff.train(config, folder / name, progress=False, start_from=start_from)
    return str(folder / name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    base = train(folder, "fedavg")
    return [base, train(folder, "fedavg_swa", f"{base}@2", **SWA)]


@pytest.mark.slow
def test_pieces_are_made_once_and_kept(runs, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    only = [x for piece in ("accuracy", "clients", "path") for x in ("--only", piece)]
    command = [*runs, "--out", str(out), "--examples", "40", "--every", "2", *only,
               "--keep", str(tmp_path / "results")]
    TABLES["main"](command)
    shown = capsys.readouterr().out
    found = json.loads((out / "table.json").read_text())
    assert list(found) == ["fedavg", "fedavg_swa"]
    trained = [ff.load_run(run) for run in runs]
    records = metrics.read(trained[1].folder.metrics_file)
    last = [r["accuracy"] for r in records if (r["split"], r["model"]) == ("test", "swa")][-2:]
    assert found["fedavg_swa"]["accuracy"] == pytest.approx(sum(last) / 2)
    assert f"{100 * found['fedavg_swa']['accuracy']:.2f}" in shown
    assert found["fedavg"]["fairness.median"] > 0
    scores = json.loads((out / "clients" / "fedavg_swa.json").read_text())["result"]["scores"]
    assert len(scores) == trained[0].experiment.data.num_clients

    points = metrics.read(out / "path" / "fedavg_train40.jsonl")
    assert [p["round"] for p in points] == [2, 4]
    loss = analysis.loss_of(trained[0], "train", 40)
    expected = flatness.of_model(loss, trained[0].at(2).model().params)["lambda_1"]
    assert points[0]["lambda_1"] == expected
    for name in ("accuracy", "clients", "path"):
        assert (out / f"{name}.png").stat().st_size > 5000
    for run in runs:
        kept = tmp_path / "results" / pathlib.Path(run).name
        assert {p.name for p in kept.iterdir()} == {"config.json", "metrics.jsonl"}
        assert metrics.read(kept / "metrics.jsonl") == metrics.read(f"{run}/metrics.jsonl")

    def refuse(*args, **options):
        raise AssertionError("made again")

    monkeypatch.setattr(ff.run.restore, "load_run", refuse)
    TABLES["main"](command)
    assert capsys.readouterr().out == shown


def test_corruptions_are_looked_at_once(runs, tmp_path, monkeypatch):
    described = [TABLES["described"](run)._replace(data="cifar10") for run in runs]
    asked = []

    def found(runs, *, model, data_dir, cache):
        asked.append(model)
        name = pathlib.Path(runs[0]).name
        return {"accuracy": {name: {"clean": 0.9, "fog": 0.5, "mean": 0.5}}}

    monkeypatch.setattr(robustness, "robustness", found)
    args = type("Args", (), {"out": tmp_path, "data": None, "cache": None})
    for _ in range(2):
        rows = TABLES["corruptions"](args, described)
        assert rows == {"fedavg": {"corrupted": 0.5}, "fedavg_swa": {"corrupted": 0.5}}
    assert asked == ["global", "swa"]
    further = [described[0]._replace(round=5)]
    TABLES["corruptions"](args, further)
    assert asked == ["global", "swa", "global"], "of another round"
    assert TABLES["corruptions"](args, [run._replace(data="digits") for run in described]) == {}


def test_runs_that_cannot_be(runs, tmp_path, capsys):
    with pytest.raises(SystemExit, match="two runs of one name"):
        TABLES["main"]([runs[0], runs[0]])
    with pytest.raises(ff.UsageError, match="is not a run folder"):
        TABLES["main"]([str(tmp_path)])
    TABLES["main"]([*runs, "--out", str(tmp_path / "out"), "--only", "plane"])
    assert "1 runs without SWA, expected three" in capsys.readouterr().out


@pytest.mark.slow
def test_everything(runs, tmp_path):
    folder, out = pathlib.Path(runs[0]).parent, tmp_path / "out"
    more = [train(folder, name, algorithm__name=name) for name in ("fedsam", "fedasam")]
    small = ["--examples", "40", "--every", "2", "--points", "3"]
    TABLES["main"]([*runs, *more, "--out", str(out), *small])
    found = json.loads((out / "table.json").read_text())
    assert {"accuracy", "lambda_1", "lambda_1/lambda_5", "trace"} <= set(found["fedasam"])
    pictures = {"accuracy", "clients", "path", "surfaces", "plane"}
    assert {p.stem for p in out.glob("*.png")} == pictures
