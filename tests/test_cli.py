"""The command line: what it prints, what it refuses, and how."""

import json
import pathlib
import re
import signal
import subprocess
import sys
import warnings

import pytest
from conftest import small_config

import fedjax_flat as ff
from fedjax_flat import cli
from fedjax_flat.demo import demo
from fedjax_flat.experiment import config
from fedjax_flat.report import tables

CONFIG = str(pathlib.Path(__file__).parents[1] / "configs" / "digits_fedavg.py")


@pytest.fixture
def call(tmp_path, capsys):
    """`call(*args)` -> (exit code, stdout, stderr); the run folder is tmp_path / run."""

    def run(*args):
        code = cli.main(["train", "--quiet", "--run", str(tmp_path / "run"), *args])
        return code, *capsys.readouterr()

    return run


SHORT = ("--config.rounds=4", "--config.eval.window=2")


def test_train_resume_continue_and_start_afresh(call, tmp_path):
    code, out, _ = call("--config", CONFIG, *SHORT)
    assert code == 0
    assert re.search(r"global +test +\d+\.\d\d ± \d+\.\d\d", out)
    assert (tmp_path / "run" / "figures" / "score.png").stat().st_size > 10_000
    assert all(len(line) <= 100 for line in out.replace(str(tmp_path), "").splitlines())

    code, *_ = call("--config.rounds=6")  # without --config: the run folder's own
    assert code == 0
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (saved["rounds"], saved["eval"]["window"]) == (6, 2)
    assert (tmp_path / "run" / "checkpoints" / "6").is_dir()

    code, _, err = call("--config", CONFIG, "--fresh", *SHORT)
    assert code == cli.EXIT_USAGE
    assert re.search(r"--fresh would delete .*a run up to round 6 \(\d+ files\).*add --yes", err)
    assert (tmp_path / "run" / "checkpoints" / "6").is_dir()

    code, out, _ = call("--config", CONFIG, "--fresh", "--yes", *SHORT)
    assert code == 0
    assert "Deleting" in out
    assert not (tmp_path / "run" / "checkpoints" / "6").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.rouds=3"], "no setting 'rouds'. Did you mean 'rounds'?"),
        (["--config.client.momentun=0"], "no setting 'client.momentun'. Did you mean "
                                         "'client.momentum'?"),
        (["--config.rounds=many"], "config.rounds=many: invalid literal for int()"),
        (["--config.debug=perhaps"], "config.debug=perhaps"),
        (["--config.client.learning_rate=-0.1"], "client.learning_rate = -0.1: expected 0 or more"),
        (["--config.client.momentum=1.0"], "client.momentum = 1.0: expected less than 1"),
        (["--config.cohort.size=21"], "a cohort of 21 from 20 clients"),
        (["--config.partition.alpha=-1.0"], "partition.alpha = -1.0: expected 0 or more"),
        (["--config.data.name=digit"], "unknown dataset 'digit'"),
        (["--config.model.name=mpl"], "Did you mean 'mlp'?"),
        (["--config.algorithm.name=fedavgg"], "unknown algorithm 'fedavgg'"),
        (["--config.server.optimizer=sdg"], "server.optimizer = 'sdg': expected one of "
                                            "sgd, adagrad, adam, yogi. Did you mean 'sgd'?"),
        (["--config.server.optimizer=adam", "--config.server.momentum=0.9"], "adam has"),
        (["--config.cohort.strategy=pmap"], "unknown cohort strategy 'pmap'"),
        (["--config.eval.splits=('tset',)"], "unknown split 'tset'"),
        (["--config.partition.name=released"], "cannot read released splits"),
        (["--config.data.name=cifar10"], "no data folder was given; it must hold cifar-10"),
        (["--data", "nowhere", "--config.data.name=cifar100"], "nowhere has no cifar-100-python"),
        (["--confg", "x"], "unknown argument '--confg'"),
        (["stray"], "unknown argument 'stray'"),
    ],
)
def test_wrong_inputs(call, tmp_path, monkeypatch, arguments, message):
    monkeypatch.delenv("FEDJAX_FLAT_DATA", raising=False)
    code, _, err = call("--config", CONFIG, *arguments)
    assert code == cli.EXIT_USAGE
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists(), "nothing is half-written"


def test_missing_config_file_and_folder(call):
    assert "no config file nowhere.py" in call("--config", "nowhere.py")[2]
    assert "has no config.json. `fedjax-flat train --config FILE --run FOLDER`" in call()[2]


def test_a_config_file_with_a_mistake(call, tmp_path):
    path = tmp_path / "mistaken.py"
    path.write_text(
        "from fedjax_flat import default_config\n"
        "def get_config():\n  c = default_config(); c.client.learning_rat = 1.0; return c\n"
    )
    code, _, err = call("--config", str(path))
    assert code == cli.EXIT_USAGE
    assert 'Did you mean "learning_rate" instead of "learning_rat"' in err


@pytest.mark.slow
def test_a_closed_pipe_is_no_traceback(tmp_path):
    command = [sys.executable, "-m", "fedjax_flat", "train", "--quiet", "--run",
               str(tmp_path / "run"), "--config", CONFIG, *SHORT]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    assert process.wait() == 128 + signal.SIGPIPE
    assert (tmp_path / "run" / "checkpoints" / "4").is_dir()


def test_fresh_refuses_a_folder_that_is_no_run(call, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    code, _, err = call("--config", CONFIG, "--fresh", "--yes")
    assert code == cli.EXIT_USAGE
    assert "refused to delete" in err
    assert (tmp_path / "run" / "thesis.tex").exists()


def test_divergence_has_its_own_exit_code(call):
    code, _, err = call("--config", CONFIG, *SHORT, "--config.client.learning_rate=1e30")
    assert code == cli.EXIT_DIVERGED
    assert "non-finite in round 1" in err


def test_damaged_checkpoint_warns_and_goes_on(call, tmp_path):
    call("--config", CONFIG, *SHORT, "--config.checkpoint.every=2")
    newest = tmp_path / "run" / "checkpoints" / "4"
    for path in newest.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-3])
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        code, _, err = call()
    assert code == 0
    assert "fedjax-flat: warning: checkpoint of round 4 is damaged and passed over" in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update({"rounds": 0}), "config.rounds = 0: expected 1 or more"),
        (lambda c: c.client.update({"epochs": True}), "config.client.epochs = True is a bool"),
    ],
)
def test_validate(change, message):
    c = small_config()
    change(c)
    with pytest.raises(ff.UsageError, match=message):
        config.validate(c)


def test_validate_names_unknown_and_missing_settings():
    c = small_config().unlock()
    c.client.rhoo = 0.1
    with pytest.raises(ff.UsageError, match=r"no setting 'client.rhoo'.*'client.rho'"):
        config.validate(c)
    c = small_config().unlock()
    del c.client
    with pytest.raises(ff.UsageError, match=r"lacks 'client\.asam_scale'"):
        config.validate(c)


def test_config_json_round_trip():
    c = small_config(client__momentum=0.5, eval__splits=("test", "train"))
    again = config.from_json(config.to_json(c))
    assert config.used(again) == config.used(c)


def test_options_of_a_config_file(tmp_path, capsys):
    path = pathlib.Path(__file__).parents[1] / "configs" / "fedsam.py"
    assert cli.main(["train", "--config", f"{path}:cifar10,alpa=0", "--run", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert "Did you mean 'alpha'?" in message
    assert "Traceback" not in message
    empty = tmp_path / "empty.py"
    empty.write_text("")
    assert cli.main(["train", "--config", str(empty), "--run", str(tmp_path / "a")]) == 2
    assert "defines no get_config()" in capsys.readouterr().err


def test_demo(tmp_path, capsys):
    assert demo(tmp_path / "demo", rounds=30, seeds=(0,), progress=False) == 0
    out = capsys.readouterr().out
    for method in ("FedAvg", "FedSAM", "FedASAM", r"FedASAM \+ SWA"):
        assert re.search(rf"^{method} +\d\d\.\d\d ± \d\.\d\d", out, re.MULTILINE)
    assert (tmp_path / "demo" / "figures" / "demo.png").exists()
    page = (tmp_path / "demo" / "report.html").read_text()
    assert "fedasam_swa_0, swa model" in page, "its surface"
    assert page.count("of 5</td>") == 4, "eigenvalues of all"


def test_table():
    text = tables.table(["name", "n"], [["a", "1"], ["long name", "200"]])
    assert text == "name         n\n---------  ---\na            1\nlong name  200"
