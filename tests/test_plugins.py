"""A user's file outside the package: own data, partition, model, task and method, start to end."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import fedjax_flat as ff
from fedjax_flat import cli, plugins

MINE = '''"""FedHalf: FedAvg that goes half of the way.

    w <- w - share Delta
"""

import flax.linen as nn
import numpy as np
import optax

import fedjax_flat as ff
from fedjax_flat.algorithms import Method


def rings():
    random = np.random.default_rng(0)
    radius, angle = random.uniform(0, 3, 240), random.uniform(0, 6.3, 240)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    labels = np.floor(radius).astype(int)
    return ff.data.from_arrays(points[:200], labels[:200], test=(points[200:], labels[200:]))


def by_angle(dataset, *, clients):
    """Each client sees one direction."""
    x, y = np.asarray(dataset.train.inputs).T
    wedge = np.floor((np.arctan2(y, x) / np.pi + 1) / 2 * clients).astype(int) % clients
    return ff.data.Partition.of([np.flatnonzero(wedge == k) for k in range(clients)])


class Tanh(nn.Module):
    """One hidden layer."""

    num_classes: int
    width: int = 8

    @nn.compact
    def __call__(self, x, *, train=False):
        del train
        x = nn.tanh(ff.models.layers.Dense(self.width)(x))
        return ff.models.layers.Dense(self.num_classes, name="classifier")(x)


def fedhalf(client, share, weighting):
    return ff.algorithms.fedavg(client, optax.sgd(share), weighting=weighting)


METHOD = Method(
    "fedhalf", "me 2026", "half of the way",
    lambda p: fedhalf(p.client, p.settings["share"], p.weighting),
    settings={"share": ff.Setting(0.5, "of the way", above=0, at_most=1)}, optimizer="own",
)
ff.register.source("rings", rings)
ff.register.partition("by_angle", by_angle, clients=4)
ff.register.model("tanh", Tanh, width=ff.Setting(8, "hidden units", at_least=1))
ff.register.method(METHOD)
'''
CONFIG = '''
from fedjax_flat import default_config

def get_config():
    c = default_config()
    c.data.name, c.partition.name, c.model.name = "rings", "by_angle", "tanh"
    c.algorithm.name, c.cohort.size, c.rounds = "fedhalf", 3, 4
    c.eval.window, c.checkpoint.every = 2, 2
    return c
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's folder with the two files and two runs in it."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "mine.py").write_text(MINE)
    (folder / "config.py").write_text(CONFIG)
    for run, width in (("a", 8), ("b", 16)):
        out = command(folder, "train", "--quiet", "--import", "mine.py", "--config", "config.py",
                      "--run", run, f"--config.model.width={width}",
                      "--config.algorithm.fedhalf.share=0.75")
        assert out.returncode == 0, out.stderr
    return folder


def command(folder, *arguments):
    path = str(pathlib.Path(ff.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-m", "fedjax_flat", *arguments], cwd=folder, text=True,
        capture_output=True, env={**os.environ, "PYTHONPATH": path}, check=False,
    )


@pytest.mark.slow
def test_the_run_folder_remembers_the_file(folder):
    config = json.loads((folder / "b" / "config.json").read_text())
    assert config["imports"] == [str(folder / "mine.py")]
    assert config["model"]["width"] == 16
    assert config["algorithm"]["fedhalf"] == {"share": 0.75}
    environment = json.loads((folder / "b" / "environment.json").read_text())
    assert environment["imports"] == {
        str(folder / "mine.py"): plugins.digest(folder / "mine.py")
    }
    assert (folder / "b" / "imports" / "0_mine.py").read_text() == MINE


@pytest.mark.slow
def test_every_command_imports_it_by_itself(folder):
    """Each in a process of its own, none with --import."""
    out = command(folder, "train", "--quiet", "--run", "a", "--config.rounds=6")
    assert out.returncode == 0, out.stderr
    assert f"a was trained with {folder / 'mine.py'}, which is run now" in out.stderr
    assert "global" in out.stdout
    compared = command(folder, "compare", "a", "b")
    assert re.search(r"^b +global +\d", compared.stdout, re.MULTILINE), compared.stderr
    curved = command(folder, "curvature", "b", "--top", "2", "--examples", "50")
    assert "lambda_1" in curved.stdout, curved.stderr
    drawn = command(folder, "landscape", "a", "--surface", "--points", "3", "--examples", "20")
    assert "figure: " in drawn.stdout, drawn.stderr


def test_a_page_about_it(folder):
    out = command(folder, "algorithms", "fedhalf", "--import", "mine.py").stdout
    assert "w <- w - share Delta" in out
    assert re.search(r"algorithm\.fedhalf\.share +0\.5 +0 < x <= 1 +of the way", out)


@pytest.mark.slow
def test_a_missing_or_changed_file_is_named(folder):
    (folder / "mine.py").rename(folder / "moved.py")
    try:
        out = command(folder, "curvature", "b", "--top", "1", "--examples", "20")
        assert out.returncode == 2
        assert f"was trained with {folder / 'mine.py'}, which is missing" in out.stderr
        (folder / "mine.py").write_text(MINE.replace("half of the way.", "the way."))
        out = command(folder, "train", "--quiet", "--run", "b", "--config.rounds=8")
        assert out.returncode == 2
        assert "has changed since b was trained with it" in out.stderr
        out = command(folder, "curvature", "b", "--top", "1", "--examples", "20")
        assert out.returncode == 0
        assert "warning" in out.stderr
        assert "has changed since" in out.stderr
    finally:
        (folder / "moved.py").rename(folder / "mine.py")
    assert "Traceback" not in out.stderr


def test_checks_for_users(folder):
    """What our own tests hold a method to, held to a user's."""
    plugins.load(str(folder / "mine.py"))
    ff.testing.check_method("fedhalf", {"algorithm.fedhalf.share": 0.75})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def broken(:\n", r"wrong\.py, line 1: "),
        ("import fedjax_flat\n", "registers nothing"),
        ("x = 1\nraise RuntimeError('my own')\n", "line 2: RuntimeError: my own"),
        ("import fedjax_flat as ff\nff.register.source('digits', lambda: None)\n",
         "two of one name: dataset 'digits'"),
        ("import fedjax_flat as ff\nff.register.source('new_one', lambda: None)\n"
         "ff.register.method(ff.algorithms.METHODS['fedavg'])\n",
         "two of one name: algorithm 'fedavg'"),
        ("import sys\nsys.exit(0)\n", "ends the program"),
        ("import fedjax_flat as ff\nff.register.method(3)\n", "expected a fedjax_flat.algorithms"),
        ("import fedjax_flat as ff\nff.register.source('a b', lambda: None)\n", "letters, digits"),
    ],
)
def test_wrong_files(tmp_path, text, message):
    file = tmp_path / "wrong.py"
    file.write_text(text)
    before = [set(table) for table in ff.register.REGISTRIES]
    with pytest.raises(ff.UsageError, match=message):
        plugins.load(str(file))
    assert [set(table) for table in ff.register.REGISTRIES] == before, "nothing stays registered"


def test_no_such_file(capsys, tmp_path):
    arguments = ["train", "--import", "nowhere.py", "--run", str(tmp_path / "r")]
    assert cli.main(arguments) == 2
    assert "--import nowhere.py: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.fedhalf.shares=0.1", "Did you mean 'algorithm.fedhalf.share'"),
        ("algorithm.fedhalf.share=0.0", "share = 0.0: expected more than 0"),
        ("algorithm.fedhalf.share=nan", "share = nan: expected a number"),
        ("model.width=0", "model.width = 0: expected 1 or more"),
        ("partition.alpha=0.3", "partition by_angle has no alpha"),
        ("server.momentum=0.9", "the server step is part of fedhalf"),
    ],
)
def test_wrong_settings(folder, override, message, capsys):
    code = cli.main(["train", "--import", str(folder / "mine.py"), "--config",
                     str(folder / "config.py"), "--run", str(folder / "c"),
                     f"--config.{override}"])
    assert code == 2
    assert message in capsys.readouterr().err


def test_a_neighbour_and_a_copy(tmp_path):
    """A file imports its neighbour; a copy of a file that was run is that file."""
    (tmp_path / "neighbour_of_mine.py").write_text("NAME = 'of_a_neighbour'\n")
    text = ("import fedjax_flat as ff\nfrom neighbour_of_mine import NAME\n"
            "ff.register.source(NAME, lambda: None)\n")
    (tmp_path / "one.py").write_text(text)
    (tmp_path / "two.py").write_text(text)
    try:
        plugins.load(str(tmp_path / "one.py"))
        assert plugins.load(str(tmp_path / "two.py")) == str(tmp_path / "two.py")
        assert str(tmp_path) not in sys.path
    finally:
        ff.data.SOURCES.remove("of_a_neighbour")


@pytest.mark.slow
def test_a_moved_project(folder, tmp_path):
    """The run folder and the file elsewhere: --import of the same content stands in."""
    import shutil

    shutil.copytree(folder / "b", tmp_path / "b")
    (tmp_path / "mine.py").write_text(MINE)
    (folder / "mine.py").rename(folder / "away.py")
    try:
        out = command(tmp_path, "train", "--quiet", "--import", "mine.py", "--run", "b",
                      "--config.rounds=6")
        assert out.returncode == 0, out.stderr
        stored = json.loads((tmp_path / "b" / "config.json").read_text())
        assert stored["imports"] == [str(tmp_path / "mine.py")]
    finally:
        (folder / "away.py").rename(folder / "mine.py")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def get_config(:\n", "line 1"),
        ("def get_config():\n  return undefined\n", "NameError: name 'undefined'"),
        ("def get_config():\n  pass\n", "returns NoneType: expected the config"),
    ],
)
def test_wrong_config_files(tmp_path, capsys, text, message):
    (tmp_path / "c.py").write_text(text)
    code = cli.main(["train", "--config", str(tmp_path / "c.py"), "--run", str(tmp_path / "r")])
    assert code == 2
    assert message in capsys.readouterr().err
