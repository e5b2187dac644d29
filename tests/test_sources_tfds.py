"""tensorflow-datasets without TensorFlow: small folders of its layout, written here."""

import gzip
import io
import json
import logging
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

import fedjax_flat as ff
from fedjax_flat.data import sources
from fedjax_flat.data.sources import tfds, tfds_folder

REAL = os.environ.get("FEDJAX_FLAT_DATA")
USERS = ("zoe", "ann", "zoe", "eve", "ann", "zoe")
SPLITS = {"train": range(6), "test": range(6, 9)}


def pixels(i, sizes=False):
    return np.random.default_rng(i).integers(0, 256, (8 + i * sizes, 9, 3), np.uint8)


def write(folder, *, name="tiny", config="", splits=SPLITS, sizes=False, supervised=True, **info):
    """A prepared data set of random pictures, classes 0 to 2, users and four numbers."""
    import tensorflow_datasets
    from array_record.python import array_record_module
    from tensorflow_datasets.proto import tf_example_pb2

    shape = (None, None, 3) if sizes else (8, 9, 3)
    of = tensorflow_datasets.features
    features = of.FeaturesDict({
        "image": of.Image(shape=shape), "label": of.ClassLabel(names=["ant", "bee", "cat"]),
        "user_id": of.Text(), "size": of.Tensor(shape=(4,), dtype=np.float32),
        "weight": of.Scalar(np.float32),
    })
    path = folder / name / config / "1.2.0"
    path.mkdir(parents=True)
    features.save_config(path)
    for split, numbers in splits.items():
        file = path / f"{name}-{split}.array_record-00000-of-00001"
        writer = array_record_module.ArrayRecordWriter(str(file), "group_size:1")
        for i in numbers:
            picture = io.BytesIO()
            Image.fromarray(pixels(i, sizes)).save(picture, "png")
            example = tf_example_pb2.Example()
            put = example.features.feature
            put["image"].bytes_list.value.append(picture.getvalue())
            put["label"].int64_list.value.append(i % 3)
            put["user_id"].bytes_list.value.append((*USERS, "zoe", "tim", "ann")[i].encode())
            put["size"].float_list.value.extend([i, 1, 2, 3])
            put["weight"].float_list.value.append(i / 2)
            writer.write(example.SerializeToString())
        writer.close()
    keys = {"tuple": {"items": [{"featureKey": "image"}, {"featureKey": "label"}]}}
    (path / "dataset_info.json").write_text(json.dumps({
        "name": name, "version": "1.2.0", "fileFormat": "array_record",
        **({"configName": config} if config else {}),
        **({"supervisedKeys": keys} if supervised else {}),
        "splits": [{"name": s, "shardLengths": [str(len(n))], "numBytes": "1",
                    "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"}
                   for s, n in splits.items()],
        **info,
    }))
    return path


@pytest.fixture(autouse=True)
def no_other_folder(monkeypatch):
    for name in ("TFDS_DATA_DIR", "FEDJAX_FLAT_CACHE", "FEDJAX_FLAT_DATA"):
        monkeypatch.delenv(name, raising=False)


def check_tiny(data):
    np.testing.assert_array_equal(data.train.inputs, [pixels(i) for i in range(6)])
    np.testing.assert_array_equal(data.test.inputs, [pixels(i) for i in range(6, 9)])
    np.testing.assert_array_equal(data.train.labels, [0, 1, 2, 0, 1, 2])
    assert data.num_classes == 3
    assert data.classes == ("ant", "bee", "cat")


def test_images_from_each_place_and_form_of_the_name(tmp_path, monkeypatch):
    write(tmp_path / "tensorflow_datasets")
    check_tiny(sources.load("tfds:tiny", tmp_path))
    check_tiny(sources.load("tfds:tiny", tmp_path / "tensorflow_datasets"))
    check_tiny(sources.load("tfds:tiny:1.2.0", tmp_path))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tensorflow_datasets"))
    check_tiny(sources.load("tfds:tiny"))
    assert "tensorflow" not in sys.modules


def test_configs(tmp_path):
    write(tmp_path, config="red")
    check_tiny(sources.load("tfds:tiny", tmp_path))
    write(tmp_path, config="blue", splits={"train": range(3), "test": range(1)})
    assert len(sources.load("tfds:tiny/blue", tmp_path).train.labels) == 3
    check_tiny(sources.load("tfds:tiny/red:1.2.0", tmp_path))
    with pytest.raises(ff.UsageError, match=r"prepared are tiny/blue, tiny/red: expected one"):
        sources.load("tfds:tiny", tmp_path)
    with pytest.raises(ff.UsageError, match=r"Did you mean 'blue'\? To prepare it:"):
        sources.load("tfds:tiny/bleu", tmp_path)


def test_the_newest_version_is_taken(tmp_path):
    path = write(tmp_path)
    newer = path.rename(path.with_name("1.10.0"))
    info = json.loads((newer / "dataset_info.json").read_text())
    (newer / "dataset_info.json").write_text(json.dumps(info | {"version": "1.10.0"}))
    write(tmp_path, splits={"train": range(2), "test": range(1)})
    check_tiny(sources.load("tfds:tiny", tmp_path))
    assert len(sources.load("tfds:tiny:1.2.0", tmp_path).train.labels) == 2


def test_owners(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    write(tmp_path)
    data = sources.load("tfds:tiny", tmp_path, owner="user_id")
    assert data.clients == ("ann", "eve", "zoe")
    np.testing.assert_array_equal(data.owners, [2, 0, 2, 1, 0, 2])
    np.testing.assert_array_equal(data.test_owners, [2, -1, 0])
    assert "1 clients have test examples only" in caplog.text
    assert sources.load("tfds:tiny", tmp_path).owners is None


def test_numbers(tmp_path):
    write(tmp_path, supervised=False)
    data = sources.load("tfds:tiny", tmp_path, input="size", label="label", owner="user_id")
    np.testing.assert_array_equal(data.train.inputs[:, 0], range(6))
    assert data.task == "classification"
    np.testing.assert_array_equal(data.test_owners, [2, -1, 0])
    data = sources.load("tfds:tiny", tmp_path, input="size", label="weight")
    assert data.task == "regression"
    np.testing.assert_array_equal(data.train.labels, np.arange(6) / 2)
    with pytest.raises(ff.UsageError, match=r"names no input: it has image, .*data.input="):
        sources.load("tfds:tiny", tmp_path)
    with pytest.raises(ff.UsageError, match=r"data.side is of images"):
        sources.load("tfds:tiny", tmp_path, input="size", label="label", side=4)


def test_images_of_several_sizes(tmp_path):
    write(tmp_path, sizes=True)
    with pytest.raises(ff.UsageError, match=r"differ in size.*--config.data.side=224"):
        sources.load("tfds:tiny", tmp_path)
    data = sources.load("tfds:tiny", tmp_path, side=6)
    assert data.train.inputs.shape == (6, 6, 6, 3)
    picture = Image.fromarray(pixels(1, sizes=True)).resize((6, 6), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(data.train.inputs[1], picture)


def test_large_ones_are_cached(tmp_path, monkeypatch):
    path = write(tmp_path)
    monkeypatch.setattr(tfds, "IN_MEMORY", 3 * 8 * 9 * 3)
    for _ in range(2):
        data = sources.load("tfds:tiny", tmp_path, owner="user_id")
        check_tiny(data)
        np.testing.assert_array_equal(data.owners, [2, 0, 2, 1, 0, 2])
        assert isinstance(data.train.inputs, np.memmap)
        assert not isinstance(data.test.inputs, np.memmap), "three images fit"
        monkeypatch.setattr(tfds.decode, "filled", lambda *a, f=tfds.decode.filled: (
            f(*a) if a[1] is None else pytest.fail("decoded again")))
    assert len(list((path / ".fedjax_flat_cache").iterdir())) == 2


def test_without_a_test_split(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    write(tmp_path, name="some", splits={"train": range(3), "validation": range(3, 5)})
    assert len(sources.load("tfds:some", tmp_path).test.labels) == 2
    assert "no test split: validation is tested on" in caplog.text
    write(tmp_path, name="one", splits={"train": range(3)})
    assert len(sources.load("tfds:one", tmp_path).test.labels) == 3
    assert "no test split: train is tested on" in caplog.text
    write(tmp_path, name="none", splits={"test": range(3)})
    with pytest.raises(ff.UsageError, match="has the splits test: expected train"):
        sources.load("tfds:none", tmp_path)


def test_what_is_not_prepared(tmp_path):
    with pytest.raises(ff.UsageError, match=r"no data folder; .*prepare tfds:mnist --data"):
        sources.load("tfds:mnist")
    with pytest.raises(ff.UsageError, match=r"holds none; .*To prepare it: fedjax-flat prepare"):
        sources.load("tfds:mnist", tmp_path)
    path = write(tmp_path, name="mnist")
    with pytest.raises(ff.UsageError, match=r"holds mnist; .*Did you mean 'mnist'\?"):
        sources.load("tfds:mnits", tmp_path)
    with pytest.raises(ff.UsageError, match=r"prepared is version 1.2.0, not 3.0.1"):
        sources.load("tfds:mnist:3.0.1", tmp_path)
    with pytest.raises(ff.UsageError, match=r"expected tfds:NAME, tfds:NAME/CONFIG"):
        sources.load("tfds:mnist:latest", tmp_path)
    with pytest.raises(ff.UsageError, match=r"expected tfds:NAME\[/CONFIG\]"):
        sources.load("tfds", tmp_path)
    info = json.loads((path / "dataset_info.json").read_text())
    (path / "dataset_info.json").write_text(json.dumps(info | {"fileFormat": "tfrecord"}))
    with pytest.raises(ff.UsageError, match=r"is prepared as tfrecord; expected array_record"):
        sources.load("tfds:mnist", tmp_path)


@pytest.mark.parametrize("damage", [
    lambda path: next(path.glob("*-train.*")).unlink(),
    lambda path: next(path.glob("*-train.*")).write_bytes(b"\0" * 70_000),
    lambda path: (path / "features.json").unlink(),
    lambda path: (path / "dataset_info.json").write_text("{"),
])
def test_damaged_folders_are_named(tmp_path, damage):
    path = write(tmp_path)
    damage(path)
    with pytest.raises(ff.UsageError, match=rf"tfds:tiny: {path} is damaged or incomplete"):
        sources.load("tfds:tiny", tmp_path)


def test_pictures_that_cannot_be_decoded(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.setitem(tfds.decode.MODES, 3, "no mode")
    with pytest.raises(ff.UsageError, match=r"6 images of split train cannot be decoded.*number 0"):
        sources.load("tfds:tiny", tmp_path)


@pytest.mark.parametrize(("settings", "says"), [
    ({"input": "imgae"}, r"has no feature 'imgae': it has .*data.input=.*Did you mean 'image'"),
    ({"label": "class"}, "has no feature 'class'"),
    ({"owner": "user"}, r"has no feature 'user'.*data.owner=.*Did you mean 'user_id'"),
    ({"input": "user_id"}, r"feature 'user_id' is Text .*expected images of bytes, or numbers"),
    ({"label": "user_id"}, r"feature 'user_id' is Text .*expected a class or a number"),
    ({"label": "size"}, r"feature 'size' is Tensor .*expected a class"),
])
def test_features_that_are_not_there_or_of_no_use(tmp_path, settings, says):
    write(tmp_path)
    with pytest.raises(ff.UsageError, match=says):
        sources.load("tfds:tiny", tmp_path, **settings)


def test_preparing_without_tensorflow(tmp_path, monkeypatch):
    monkeypatch.setattr(tfds_folder.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ff.UsageError, match=r"needs TensorFlow.*pip install 'fedjax-flat\[tfds\]'"):
        tfds_folder.prepare("mnist", tmp_path)
    with pytest.raises(ff.UsageError, match="no data folder was given"):
        tfds_folder.prepare("mnist", None)


def test_preparing_what_is_there_in_another_format(tmp_path, monkeypatch):
    write(tmp_path / "tensorflow_datasets", fileFormat="tfrecord")
    monkeypatch.setattr(tfds_folder.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ff.UsageError, match="Move that folder away"):
        tfds_folder.prepare("tiny", tmp_path)


def test_preparing_what_does_not_exist(tmp_path, monkeypatch):
    monkeypatch.setattr(tfds_folder.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ff.UsageError, match=r"has no 'mnits'\. Did you mean 'mnist'\?"):
        tfds_folder.prepare("mnits", tmp_path)


def test_nothing_heavy_is_imported_before_it_is_needed():
    heavy = ("tensorflow_datasets", "array_record", "PIL", "sklearn", "h5py", "tensorflow")
    code = ("import sys, fedjax_flat.cli, fedjax_flat.data; "
            f"print([m for m in {heavy} if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def originals(folder, part):
    """(images, labels) of the four files that LeCun published."""
    read = lambda kind, skip: np.frombuffer(
        gzip.decompress((folder / f"{part}-{kind}-ubyte.gz").read_bytes()), np.uint8, offset=skip
    )
    return read("images-idx3", 16).reshape(-1, 28, 28, 1), read("labels-idx1", 8)


@pytest.mark.slow
def test_real_mnist_is_that_of_the_original_files():
    files = pathlib.Path(REAL or "") / "mnist" / "train-images-idx3-ubyte.gz"
    if not REAL or not files.is_file() or not tfds_folder.prepared(
            pathlib.Path(REAL) / "tensorflow_datasets", "mnist"):
        pytest.skip("FEDJAX_FLAT_DATA has no mnist/*.gz or no tensorflow_datasets/mnist")
    data = sources.load("tfds:mnist", REAL)
    examples = lambda images, labels: sorted(
        bytes([y]) + x.tobytes() for x, y in zip(images, labels, strict=True)
    )
    for found, part in ((data.train, "train"), (data.test, "t10k")):
        assert examples(*found) == examples(*originals(files.parent, part))
