"""`fedjax-flat datasets` and `prepare`, and sources with settings inside an experiment."""

import json
import pathlib
import re

import numpy as np
import pytest
from conftest import small_config
from PIL import Image

import fedjax_flat as ff
from fedjax_flat import cli
from fedjax_flat.data import SOURCES
from fedjax_flat.report import datasets


@pytest.fixture(autouse=True)
def no_folder(monkeypatch):
    for name in ("FEDJAX_FLAT_DATA", "FEDJAX_FLAT_CACHE", "TFDS_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("width", [60, 80, 132])
def test_the_table_fits_and_says_everything(width, tmp_path):
    *lines, folder = datasets.overview(tmp_path, width).splitlines()
    assert max(map(len, lines)) <= width
    bare = lambda text: "".join(text.split())
    words = bare("".join(lines))
    for name, source in SOURCES.items():
        assert (f"{name}:{source.argument}" if source.argument else name) in words
        for said in (source.about, source.size, source.licence, source.files):
            assert bare(said) in words
    assert "data.skip_unreadable" in words
    assert folder == f"here: in {tmp_path}"


def test_what_is_here(tmp_path, capsys, monkeypatch):
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "tensorflow_datasets/mnist/3.0.1").mkdir(parents=True)
    (tmp_path / "tensorflow_datasets/mnist/3.0.1/dataset_info.json").write_text("{}")
    (tmp_path / "own.npz").touch()
    assert cli.main(["datasets", "--data", str(tmp_path), "--json"]) == 0
    found = {d["name"]: d for d in json.loads(capsys.readouterr().out)}
    assert all(found[n]["here"] for n in ("cifar10", "digits", "npz", "tfds"))
    assert not any(found[n]["here"] for n in ("cifar100", "celeba", "images", "landmarks", "npy"))
    assert list(found) == sorted(SOURCES)
    assert found["celeba"]["settings"]["data.side"]["default"] == 84
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setenv("FEDJAX_FLAT_DATA", str(tmp_path))
    assert cli.main(["datasets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 70
    here = {line.split()[0]: line.split()[1] for line in lines if line[:1].isalpha()}
    assert (here["cifar10"], here["cifar100"]) == ("yes", "no")


def test_no_folder_and_wrong_ones(tmp_path, capsys):
    assert cli.main(["datasets"]) == 0
    assert "no data folder (--data or FEDJAX_FLAT_DATA)" in capsys.readouterr().out
    assert cli.main(["datasets", "--data", str(tmp_path / "away")]) == 2
    assert "no data folder" in capsys.readouterr().err
    assert cli.main(["datasets", "cifar10"]) == 2


def test_a_users_source_is_listed(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "import numpy as np\nimport fedjax_flat as ff\n"
        "def mine(data_dir=None):\n    return ff.data.from_arrays(np.ones((2, 1)), np.arange(2))\n"
        "ff.register.source('mine_of_test', mine)\n"
    )
    try:
        assert cli.main(["datasets", "--import", str(tmp_path / "mine.py")]) == 0
        assert "mine_of_test" in capsys.readouterr().out
    finally:
        SOURCES.remove("mine_of_test")


def test_prepare_says_what_it_can_prepare(tmp_path, capsys, monkeypatch):
    assert cli.main(["prepare", "cifar10", "--data", str(tmp_path)]) == 2
    assert "expected tfds:NAME" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["prepare", "tfds:mnist", "--data", str(tmp_path)]) == 2
    assert "preparing needs TensorFlow" in capsys.readouterr().err


def test_the_examples_of_the_documentation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (pathlib.Path(__file__).parents[1] / "docs" / "data.md").read_text()
    python = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    try:
        exec("\n".join(python), {})
        mine, places = ff.data.load("mine"), ff.data.load("my_places")
    finally:
        for name in ("mine", "my_places"):
            SOURCES.remove(name)
    ff.data.check_places(places)
    assert len(mine.clients) == 6
    own = ff.data.load("npz:mine.npz")
    assert (len(own.test.labels), own.clients) == (9, ("0", "1"))
    table = re.findall(r"```csv\n(.*?)```", text, re.DOTALL)[0]
    for line in table.splitlines()[1:]:
        path = tmp_path / "pets" / line.split(",")[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 7)).save(path)
    (tmp_path / "pets" / "list.csv").write_text(table)
    pets = ff.data.load("images:pets", side=64)
    assert pets.clients == ("ann", "zoe")
    assert pets.input_shape == (64, 64, 3)


def test_settings_of_a_source_reach_it_through_a_config(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(12):
        path = tmp_path / "pets" / ("cat", "dog")[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (10, 12, 3), np.uint8)).save(path)
    config = small_config(data__name="images:pets", data__side=8, model__name="mlp",
                          partition__clients=2, cohort__size=2)
    experiment = ff.experiment.build(config, tmp_path)
    assert experiment.data.examples.inputs.shape == (12, 8, 8, 3)
    config.data.side = 0
    with pytest.raises(ff.UsageError, match=r"config.data.side = 0: expected 1 or more"):
        ff.experiment.build(config, tmp_path)
    config.data.side, config.data.split = 8, "geo_100"
    with pytest.raises(ff.UsageError, match=r"data.split"):
        ff.experiment.build(config, tmp_path)
