"""Characters by writer in LEAF's and TensorFlow Federated's layout; clients and their files."""

import json
import logging
import sys

import h5py
import numpy as np
import pytest

import fedjax_flat as ff
from fedjax_flat.data import Examples, sources
from fedjax_flat.data.sources import clients

TRAIN = {"f1": ([0, 11, 3], 0), "f0": ([61], 1), "letters": ([40, 41], 2)}
TEST = {"f1": ([5], 3), "f0": ([7, 8], 4), "tested": ([9], 5), "letters": ([12], 6)}


def pixels(labels, seed):
    return np.random.default_rng(seed).random((len(labels), 28, 28)).astype(np.float32)


def write_leaf(folder, parts, name="all_data_0.json"):
    folder.mkdir(parents=True, exist_ok=True)
    data = {user: {"x": pixels(y, seed).reshape(-1, 784).tolist(), "y": y}
            for user, (y, seed) in parts.items()}
    content = {"users": list(data), "num_samples": [len(d["y"]) for d in data.values()],
               "user_data": data}
    (folder / name).write_text(json.dumps(content))
    return content


def write_tff(path, parts):
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as f:
        for user, (y, seed) in parts.items():
            group = f.create_group(f"examples/{user}")
            group["pixels"], group["label"] = pixels(y, seed), np.array(y, np.int32)


def write(root, layout):
    if layout == "leaf":  # users are spread over files
        first = {"f1": TRAIN["f1"]}
        write_leaf(root / "femnist/data/train", first, "all_data_0.json")
        write_leaf(root / "femnist/data/train", {k: TRAIN[k] for k in ("f0", "letters")}, "b.json")
        write_leaf(root / "femnist/data/test", TEST)
    else:
        for split, parts in (("train", TRAIN), ("test", TEST)):
            write_tff(root / f"femnist/fed_emnist_{split}.h5", parts)


@pytest.mark.parametrize("layout", ["leaf", "tff"])
def test_both_layouts(tmp_path, layout, caplog):
    write(tmp_path, layout)
    with caplog.at_level(logging.INFO, "fedjax_flat"):
        data = sources.load("femnist", tmp_path)
    assert data.clients == ("f0", "f1", "letters")
    np.testing.assert_array_equal(data.owners, [0, 1, 1, 1, 2, 2])
    np.testing.assert_array_equal(data.train.labels, [61, 0, 11, 3, 40, 41])
    np.testing.assert_array_equal(data.test_owners, [0, 0, 1, 2, -1])
    np.testing.assert_array_equal(data.test.labels, [7, 8, 5, 12, 9])
    assert caplog.messages == [
        "femnist: without train examples: tested. Their 1 test examples count as nobody's."]
    assert data.train.inputs.dtype == np.uint8
    expected = np.floor(255 * pixels([0, 11, 3], 0).astype(float) + 0.5)
    np.testing.assert_array_equal(data.train.inputs[1:4, ..., 0], expected)
    assert (data.classes[11], data.classes[40], data.num_classes) == ("B", "e", 62)
    batch = ff.data.Batch(data.train.inputs, data.train.labels, np.ones(6, bool))
    seen = ff.data.preprocess(data).evaluate(batch).inputs
    np.testing.assert_allclose(seen[1:4, ..., 0], pixels([0, 11, 3], 0), atol=0.51 / 255)


@pytest.mark.parametrize("layout", ["leaf", "tff"])
def test_digits_only(tmp_path, layout):
    write(tmp_path, layout)
    data = sources.load("femnist", tmp_path, classes=10)
    assert data.clients == ("f1",)
    np.testing.assert_array_equal(data.train.labels, [0, 3])
    np.testing.assert_array_equal(data.test_owners, [-1, -1, 0, -1])
    assert (data.num_classes, len(data.classes)) == (10, 10)
    ff.data.check_labels(data)


def test_two_layouts_at_once(tmp_path):
    write(tmp_path, "leaf")
    write(tmp_path, "tff")
    with pytest.raises(ff.UsageError, match=r"femnist/data and femnist/fed_emnist_train.h5, which"):
        sources.load("femnist", tmp_path)
    assert len(sources.load("femnist", tmp_path, layout="tff").clients) == 3


def test_an_asked_layout_that_is_not_there(tmp_path):
    write(tmp_path, "leaf")
    with pytest.raises(ff.UsageError, match=r"has no femnist/fed_emnist_train.h5"):
        sources.load("femnist", tmp_path, layout="tff")


def changed(key, value=None):
    """Drops or replaces a key of the content of a LEAF file."""

    def change(content):
        del content[key]
        if value is not None:
            content[key] = value
        return json.dumps(content)

    return change


@pytest.mark.parametrize(("change", "message"), [
    (changed("user_data"), "no LEAF file, it lacks user_data"),
    (changed("num_samples", [3, 1]), "lacks num_samples of some users"),
    (changed("num_samples", [3, 1, 5]), "'letters' has 2 x and 2 y, but num_samples says 5"),
    (lambda content: json.dumps(content)[:-900], r"bytes that are no JSON .*truncated"),
    (lambda content: "[]", "no LEAF file, it lacks users, num_samples, user_data"),
    (lambda content: json.dumps(content).replace("[61]", "[62]"), "labels from 62 to 62"),
    (changed("user_data", {u: {"x": [[2.0] * 784] * len(y), "y": y}
                           for u, (y, _) in TRAIN.items()}), "from 0 to 2 and 3 labels: expected"),
    (changed("user_data", {u: {"x": [[0.5] * 83] * len(y), "y": y}
                           for u, (y, _) in TRAIN.items()}), r"pixels of shape \(3, 83\)"),
    (lambda content: json.dumps({"users": [], "num_samples": [], "user_data": {}}),
     "no client has a train example"),
])
def test_damaged_leaf_files(tmp_path, change, message):
    folder = tmp_path / "femnist/data"
    content = write_leaf(folder / "train", TRAIN)
    write_leaf(folder / "test", TEST)
    (folder / "train/all_data_0.json").write_text(change(content))
    with pytest.raises(ff.UsageError, match=message):
        sources.load("femnist", tmp_path)


def test_leaf_files_that_are_missing_or_too_many(tmp_path):
    folder = tmp_path / "femnist/data"
    write_leaf(folder / "train", TRAIN)
    with pytest.raises(ff.UsageError, match=r"test has no .json file.*preprocess.sh"):
        sources.load("femnist", tmp_path)
    write_leaf(folder / "train", TRAIN, "another_run.json")
    with pytest.raises(ff.UsageError, match=r"user 'f1' is in all_data_0.json already|another_run"):
        sources.load("femnist", tmp_path)


def test_damaged_hdf5_files(tmp_path):
    write(tmp_path, "tff")
    train = tmp_path / "femnist/fed_emnist_train.h5"
    whole = train.read_bytes()
    train.write_bytes(whole[:-2000])
    with pytest.raises(ff.UsageError, match=rf"{len(whole) - 2000:,} bytes that are no whole HDF5"):
        sources.load("femnist", tmp_path)
    with h5py.File(train, "w") as f:
        f["images"] = np.zeros(3)
    with pytest.raises(ff.UsageError, match="has images, but no group 'examples'"):
        sources.load("femnist", tmp_path)
    with h5py.File(train, "w") as f:
        f["examples/f0/pixels"] = np.zeros((1, 28, 28))
    with pytest.raises(ff.UsageError, match="client 'f0' has pixels, but no label"):
        sources.load("femnist", tmp_path)
    train.write_bytes(whole)
    (tmp_path / "femnist/fed_emnist_test.h5").unlink()
    with pytest.raises(ff.UsageError, match=r"has no fed_emnist_test.h5"):
        sources.load("femnist", tmp_path)


def test_without_h5py(tmp_path, monkeypatch):
    write(tmp_path, "tff")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ff.UsageError, match=r"fed_emnist_train.h5 is an HDF5.*fedjax-flat\[hdf5\]"):
        sources.load("femnist", tmp_path)


def test_many_strangers_in_one_sentence(caplog):
    part = lambda n: Examples(np.zeros((n, 2)), np.zeros(n, int))
    with caplog.at_level(logging.INFO, "fedjax_flat"):
        clients.by_client("x", {"a": part(1)}, {"b": part(2), "c": part(3), "d": part(0)}, 2)
    assert caplog.messages == [
        "x: without train examples: 2 clients. Their 5 test examples count as nobody's."]
    with pytest.raises(ff.UsageError, match="x: no client has a test example"):
        clients.by_client("x", {"a": part(1)}, {"a": part(0)}, 2)
