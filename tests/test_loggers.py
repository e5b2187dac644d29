"""Metrics also go where a setting says: what is there is what metrics.jsonl has."""

import csv
import json
import sys
import types

import pytest
from conftest import small_config

import fedjax_flat as ff
from fedjax_flat.experiment import config as config_lib
from fedjax_flat.experiment import usage
from fedjax_flat.run import loggers, metrics

RECORD = {"round": 3, "split": "test", "model": "global", "loss": 0.1 + 0.2, "clients": 2}


def config_of(to):
    return small_config(metrics__to=to)


def started(folder, to, *, kept=(), start=0):
    return loggers.begin(config_of(to), folder, kept, start)


def test_names_are_those_of_the_setting():
    assert tuple(loggers.LOGGERS) == usage.LOGGERS
    with pytest.raises(ff.UsageError, match=r"unknown metrics.to 'csw'.* Did you mean 'csv'"):
        config_lib.validate(config_of("csw+wandb"))
    assert usage.loggers(config_of("none")) == []


def test_all_of_them_are_told_all(tmp_path):
    pytest.importorskip("tensorboardX")
    config = small_config(rounds=2, eval__window=1, model__hidden=(4,), cohort__size=2,
                          metrics__to="csv+tensorboard")
    ff.train(config, tmp_path / "a", progress=False)
    with open(tmp_path / "a" / "metrics.csv", newline="") as file:
        lines = [(int(r["round"]), r["split"], r["model"], r["name"], float(r["value"]))
                 for r in csv.DictReader(file)]
    assert lines == [
        (r["round"], r["split"], r["model"], name, value)
        for r in metrics.read(tmp_path / "a" / "metrics.jsonl")
        for name, value in r.items() if isinstance(value, int | float) and name != "round"
    ]
    (events,) = (tmp_path / "a" / "tensorboard").glob("events*")
    assert b"test/global/accuracy" in events.read_bytes()


def test_a_csv_goes_on_without_what_is_written_again(tmp_path):
    for start in (0, 3):
        (log,) = started(tmp_path, "csv", kept=[RECORD] * bool(start), start=start)
        log.write({**RECORD, "round": 4})
        log.flush()
        log.close()
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert lines[0] == "round,split,model,name,value"
    assert [line.split(",")[0] for line in lines[1:]] == ["3", "3", "4", "4"]
    assert lines[1] == f"3,test,global,loss,{0.1 + 0.2!r}"


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the library, which says what it was told."""
    told = []
    run = types.SimpleNamespace(
        log=lambda values: told.append(("log", values)),
        define_metric=lambda *a, **k: told.append(("define", a, k)),
        finish=lambda: told.append(("finish",)),
    )
    module = types.ModuleType("wandb")
    module.Settings = lambda **given: given
    module.init = lambda **given: told.append(("init", given)) or run
    monkeypatch.setitem(sys.modules, "wandb", module)
    return told


def test_wandb_is_offline_unless_it_is_told_otherwise(tmp_path, wandb, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    folder = tmp_path / "fedsam_0"
    (log,) = started(folder, "wandb", start=2)
    log.write(RECORD)
    log.flush()
    log.close()
    (_, given), define, logged, finished = wandb
    assert (given["mode"], given["group"], given["name"]) == (
        "offline", "fedsam_0", "fedsam_0 from round 2")
    assert given["dir"] == str(folder)
    assert given["config"]["algorithm.name"] == "fedavg"
    assert define == ("define", ("*",), {"step_metric": "round"})
    assert logged == ("log", {"round": 3, "test/global/loss": 0.1 + 0.2, "test/global/clients": 2})
    assert finished == ("finish",)
    monkeypatch.setenv("WANDB_MODE", "online")
    started(folder, "wandb")
    assert wandb[-2][1]["mode"] == "online"


@pytest.mark.parametrize(("name", "library"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_library_that_is_missing(tmp_path, monkeypatch, name, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ff.UsageError, match=rf"needs {library}: pip install 'fedjax-flat\[{name}"):
        started(tmp_path, f"csv+{name}")


def test_runs_of_before_are_read(tmp_path):
    text = json.loads(config_lib.to_json(config_of("none")))
    del text["metrics"]
    for old, new in ((True, "tensorboard"), (False, "none")):
        found = config_lib.from_json(json.dumps({**text, "tensorboard": old}))
        assert found.metrics.to == new
        assert config_lib.differences(found, config_of("none")) == [], "it may change"
