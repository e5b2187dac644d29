"""Rounds to a target, communication, and the table of several runs."""

import json

import pytest
from conftest import small_config

from fedjax_flat import cli
from fedjax_flat.experiment import config
from fedjax_flat.report import tables
from fedjax_flat.run import metrics


def records(accuracies, floats, model="global"):
    out = []
    for t, accuracy in enumerate(accuracies, 1):
        out.append({"round": t, "split": "cohort", "model": "local", "loss": 1.0, "drift": 0.1,
                    "accuracy": 0.0, "clients": 2, "bytes_down": floats, "bytes_up": 2 * floats})
        out.append({"round": t, "split": "test", "model": model, "loss": 1.0, "accuracy": accuracy})
    return out


def write(folder, found):
    folder.mkdir()
    (folder / "config.json").write_text(config.to_json(small_config(eval__window=2)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in found))
    return str(folder)


def test_rounds_and_floats_to_a_target():
    found = records([0.1, 0.5, 0.4, 0.6], 10)
    assert metrics.rounds_to(found, 0.45) == 2
    assert metrics.rounds_to(found, 0.6) == 4
    assert metrics.rounds_to(found, 0.61) is None
    assert metrics.bytes_until(found, 2) == 60
    assert metrics.bytes_until(found) == 120


def test_table_of_runs(tmp_path, capsys):
    a = write(tmp_path / "base", records([0.1, 0.3, 0.5, 0.5], 10))
    b = write(tmp_path / "fast", records([0.2, 0.6, 0.7, 0.8], 20))
    c = write(tmp_path / "never", records([0.1, 0.1, 0.1, 0.2], 10))
    figure = tmp_path / "curves.png"
    assert cli.main(["compare", a, b, c, "--figure", str(figure)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "rounds to 50.00 %" in lines[0]
    assert lines[2].split() == ["base", "global", "50.00", "±", "0.00", "3", "0.75", "B",
                                "5", "B", "(1x)", "10", "B", "(1x)"]
    assert lines[3].split() == ["fast", "global", "75.00", "±", "5.00", "2", "1.00", "B",
                                "10", "B", "(0.5x)", "20", "B", "(0.5x)"]
    assert lines[4].split()[:7] == ["never", "global", "15.00", "±", "5.00", "-", "-"]
    assert max(map(len, lines)) <= 120
    assert figure.stat().st_size > 1000


def test_the_factor_is_the_first_runs_over_this_ones(tmp_path, capsys):
    a = write(tmp_path / "plain", records([0.5, 0.5], 20_000_000))
    b = write(tmp_path / "less", records([0.5, 0.5], 100_000))
    assert cli.main(["compare", a, b]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[-6:] == ["10", "MB", "(1x)", "20", "MB", "(1x)"]
    assert lines[3].split()[-6:] == ["50", "kB", "(200x)", "100", "kB", "(200x)"]
    sizes = [tables.bytes_of(n) for n in (0, 999, 1e3, 6.76e6)]
    assert sizes == ["0 B", "999 B", "1 kB", "6.76 MB"]


def test_no_run_there(tmp_path, capsys):
    assert cli.main(["compare", str(tmp_path)]) == 2
    assert "is not a run folder: it has no config.json" in capsys.readouterr().err


def test_another_split(tmp_path, capsys):
    as_validation = lambda found: [
        r | {"split": r["split"].replace("test", "validation")} for r in found
    ]
    a = write(tmp_path / "a", as_validation(records([0.1, 0.4, 0.4], 10)))
    assert cli.main(["compare", a]) == 2
    assert "the test split: it has validation. Choose another" in capsys.readouterr().err
    assert cli.main(["compare", a, "--split", "validation"]) == 0
    assert "validation accuracy (%)" in capsys.readouterr().out


def test_algorithms_as_table_and_as_data(capsys):
    assert cli.main(["algorithms"]) == 0
    text, said = capsys.readouterr()
    assert said == "", "nothing of experiments that nobody will run"
    assert max(map(len, text.splitlines())) <= 100
    assert cli.main(["algorithms", "--json"]) == 0
    data = {d["name"]: d for d in json.loads(capsys.readouterr().out)}
    assert all(name in text for name in data)
    scaffold = data["scaffold"]
    assert (scaffold["models_down"], scaffold["models_up"], scaffold["client_state"]) == (2, 2, 1)
    assert data["fedgamma"]["gradients_per_step"] == 2
    assert data["naivefedgloss"]["exchanges"] == 2


def test_last_window_is_a_mean_never_a_maximum():
    mean, deviation, count = metrics.window_mean(records([0.9, 0.1, 0.2], 1), 2)
    assert (mean, count) == (pytest.approx(0.15), 2)
    assert deviation == pytest.approx(0.05)
