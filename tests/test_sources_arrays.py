"""Own arrays in files: their names, memory-mapped ones, and what is said of wrong ones."""

import json
import logging

import numpy as np
import pytest

import fedjax_flat as ff
from fedjax_flat.data import sources
from fedjax_flat.data.sources import base

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (12, 5, 4, 3), np.uint8)
LABELS = np.arange(12) % 3
OWNERS = np.array(["zoe", "ann", "eve"] * 4)


def test_npz_with_test_set_and_owners(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    np.savez(tmp_path / "own.npz", inputs=IMAGES[:9], labels=LABELS[:9], test_inputs=IMAGES[9:],
             test_labels=LABELS[9:], owners=OWNERS[:9], test_owners=["ann", "", "tim"], note=1)
    data = sources.load("npz:own.npz", tmp_path)
    np.testing.assert_array_equal(data.train.inputs, IMAGES[:9])
    np.testing.assert_array_equal(data.test.labels, LABELS[9:])
    assert data.num_classes == 3
    assert data.clients == ("ann", "eve", "zoe")
    np.testing.assert_array_equal(data.owners, [2, 0, 1] * 3)
    np.testing.assert_array_equal(data.test_owners, [0, -1, -1])
    np.testing.assert_allclose(data.mean, (IMAGES[:9] / 255).mean((0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(data.std, (IMAGES[:9] / 255).std((0, 1, 2)), atol=2e-6)
    assert "note not used" in caplog.text
    assert "1 clients have test examples only" in caplog.text
    whole = sources.load(f"npz:{tmp_path / 'own.npz'}")
    np.testing.assert_array_equal(whole.train.labels, data.train.labels)


def test_npz_as_keras_writes_it(tmp_path):
    np.savez(tmp_path / "k.npz", x_train=IMAGES, y_train=LABELS[:, None], x_test=IMAGES[:2],
             y_test=LABELS[:2, None])
    data = sources.load("npz:k.npz", tmp_path)
    np.testing.assert_array_equal(data.train.labels, LABELS)
    assert len(data.test.labels) == 2
    assert data.owners is None


def test_numbers_beside_the_arrays(tmp_path):
    np.savez(tmp_path / "n.npz", inputs=IMAGES, labels=LABELS, num_classes=7, max_value=255,
             mean=[0.5] * 3, std=[0.25] * 3, owners=np.arange(12) % 11)
    data = sources.load("npz:n.npz", tmp_path)
    assert (data.num_classes, data.max_value) == (7, 255.0)
    assert (data.mean, data.std) == ((0.5,) * 3, (0.25,) * 3)
    assert data.clients[9:] == ("9", "10"), "numbers are in their own order"


def test_numbers_to_predict(tmp_path):
    np.savez(tmp_path / "r.npz", inputs=np.ones((4, 2), np.float32), labels=np.ones(4, np.float32))
    data = sources.load("npz:r.npz", tmp_path)
    assert data.task == "regression"
    assert data.test is data.train


@pytest.mark.parametrize(("arrays", "says"), [
    ({"inputs": IMAGES, "label": LABELS}, "has inputs, label, but no labels"),
    ({"inputs": IMAGES, "labels": LABELS, "test_inputs": IMAGES}, "but no test_labels"),
    ({"inputs": IMAGES, "labels": LABELS, "test_owners": LABELS}, "but no owners"),
    ({"inputs": IMAGES, "labels": LABELS[:5]}, "as many labels as inputs"),
    ({"inputs": IMAGES, "labels": LABELS, "owners": LABELS[:5]},
     r"owners of shape \(5,\), but there are 12 examples"),
    ({"inputs": IMAGES, "labels": LABELS, "owners": LABELS, "test_owners": LABELS[:1]},
     r"test_owners of shape \(1,\)"),
    ({"inputs": IMAGES, "labels": np.array([{}] * 12)}, r"cannot be read as an .npz of plain"),
    ({"inputs": IMAGES, "labels": LABELS, "mean": [0.5]}, "give both or none"),
    ({"inputs": IMAGES[:0], "labels": LABELS[:0]}, "has no examples"),
])
def test_wrong_npz(tmp_path, arrays, says):
    np.savez(tmp_path / "w.npz", **arrays)
    with pytest.raises(ff.UsageError, match=says):
        sources.load("npz:w.npz", tmp_path)


def test_files_that_are_no_npz(tmp_path):
    (tmp_path / "w.npz").write_bytes(b"PK\x03\x04 truncated")
    with pytest.raises(ff.UsageError, match=r"cannot be read as an .npz"):
        sources.load("npz:w.npz", tmp_path)
    np.save(tmp_path / "single.npy", LABELS)
    with pytest.raises(ff.UsageError, match=r"cannot be read as an .npz"):
        sources.load("npz:single.npy", tmp_path)
    with pytest.raises(ff.UsageError, match=r"no .*/away.npz and no away.npz"):
        sources.load("npz:away.npz", tmp_path)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "big").mkdir()
    for name, array in (("inputs", IMAGES), ("labels", LABELS), ("owners", LABELS % 2)):
        np.save(tmp_path / "big" / f"{name}.npy", array)
    return tmp_path / "big"


def test_npy_stays_on_disk(folder, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    read = []
    take = np.memmap.__getitem__
    monkeypatch.setattr(np.memmap, "__getitem__",
                        lambda self, i: read.append(np.size(i)) or take(self, i))
    monkeypatch.setattr(base, "MOST_FOR_STATISTICS", 4)
    data = sources.load("npy:big", folder.parent)
    assert isinstance(data.train.inputs, np.memmap)
    assert data.train.inputs.filename == folder / "inputs.npy"
    assert sum(read) <= 4 + 2, "four images, and no more, are read for the mean"
    assert "those of 4 images, evenly spaced among 12" in caplog.text
    some = IMAGES[np.linspace(0, 11, 4).astype(int)] / 255
    np.testing.assert_allclose(data.mean, some.mean((0, 1, 2)), rtol=1e-12)
    read.clear()
    info = {"mean": [0.4, 0.5, 0.6], "std": [0.1, 0.2, 0.3], "max_value": 255, "num_classes": 5}
    (folder / "info.json").write_text(json.dumps(info))
    data = sources.load("npy:big", folder.parent)
    assert not read, "with a mean, no pixel is read"
    assert (data.mean, data.std) == ((0.4, 0.5, 0.6), (0.1, 0.2, 0.3))
    assert (data.max_value, data.num_classes) == (255.0, 5)
    np.testing.assert_array_equal(data.owners, LABELS % 2)


def test_wrong_npy(folder):
    (folder / "info.json").write_text('{"means": 1}')
    with pytest.raises(ff.UsageError, match=r"has means: expected only.*Did you mean 'mean'"):
        sources.load("npy:big", folder.parent)
    (folder / "info.json").write_text('{"mean": ')
    with pytest.raises(ff.UsageError, match=r"info.json: not an object of numbers in JSON"):
        sources.load("npy:big", folder.parent)
    (folder / "info.json").unlink()
    content = (folder / "labels.npy").read_bytes()
    (folder / "labels.npy").write_bytes(content[:-20])
    with pytest.raises(ff.UsageError, match=r"labels.npy cannot be memory-mapped"):
        sources.load("npy:big", folder.parent)
    (folder / "labels.npy").unlink()
    with pytest.raises(ff.UsageError, match=r"big has inputs, owners, but no labels"):
        sources.load("npy:big", folder.parent)


def test_from_arrays_keeps_memory_maps(folder):
    inputs = np.load(folder / "inputs.npy", mmap_mode="r")
    data = ff.data.from_arrays(inputs, LABELS)
    assert data.train.inputs is inputs
