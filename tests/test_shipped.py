"""Config files come with the package, by name, wherever it is installed."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from fedjax_flat import cli, config_files

ROOT = pathlib.Path(__file__).parents[1]


def test_names_are_those_of_the_folder():
    assert set(config_files.shipped()) == {p.stem for p in (ROOT / "configs").glob("*.py")}
    assert list(config_files.shipped("sweeps")) == ["digits"]
    assert (ROOT / "fedjax_flat/configs").resolve() == ROOT / "configs", "one copy of each"


def test_by_name_and_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fedsam").mkdir()  # a folder of that name is meant by ./fedsam
    config = config_files.load_config("fedsam:cifar10,alpha=0.05", ["--config.rounds=7"], None)
    assert (config.data.name, config.partition.alpha, config.rounds) == ("cifar10", 0.05, 7)
    (tmp_path / "mora").write_text("def get_config(): 1 / 0")
    assert config_files.load_config("mora:fedavg", [], None).data.name == "cifar100"


def test_misspelt_and_listed(capsys, tmp_path):
    assert cli.main(["train", "--config", "fedsamm:cifar10", "--run", str(tmp_path / "a")]) == 2
    said = capsys.readouterr().err
    assert "no config file fedsamm; `fedjax-flat configs` lists" in said
    assert "Did you mean 'fedsam'?" in said
    assert cli.main(["sweep", "digit", "--run", str(tmp_path / "a")]) == 2
    assert "Did you mean 'digits'?" in capsys.readouterr().err
    assert cli.main(["configs"]) == 0
    listed = capsys.readouterr().out
    for name in (*config_files.shipped(), "digits"):
        assert f"\n{name} " in listed, name
    assert max(map(len, listed.splitlines())) <= 100
    assert cli.main(["configs", "sweeps/digits"]) == 0
    assert "digits.py" in capsys.readouterr().out
    assert cli.main(["configs", "fedsa"]) == 2
    assert "Did you mean 'fedsam'?" in capsys.readouterr().err


@pytest.mark.slow
def test_what_is_installed_has_them(tmp_path):
    """What a wheel holds, without the metadata, for which setuptools may be too old here."""
    pytest.importorskip("setuptools")
    build = ["-c", "from setuptools import setup; setup()", "-q", "egg_info", "--egg-base",
             str(tmp_path), "build_py", "--build-lib", str(tmp_path / "lib")]
    subprocess.run([sys.executable, "-W", "ignore", *build], cwd=ROOT, check=True,
                   capture_output=True)
    lib = tmp_path / "lib"
    there = {str(p.relative_to(lib / "fedjax_flat")) for p in lib.rglob("*.*")}
    assert {"configs/fedsam.py", "configs/sweeps/digits.py", "report/page/page.js"} <= there
    program = ("from fedjax_flat import config_files as c, __file__ as f; import json; "
               "print(json.dumps([f, c.load_config('digits_fedavg', [], None).data.name]))")
    environment = {**os.environ, "PYTHONPATH": str(lib)}
    said = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True,
                          capture_output=True, text=True, env=environment)
    file, data = json.loads(said.stdout)
    assert file.startswith(str(lib))
    assert data == "digits"
