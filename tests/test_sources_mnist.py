"""MNIST's four files: found in every place, and what is said when one is not what it should be."""

import gzip
import hashlib
import struct

import numpy as np
import pytest
import real

import fedjax_flat as ff
from fedjax_flat.data import sources
from fedjax_flat.data.sources import mnist


def idx(array):
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return header + array.tobytes()


@pytest.fixture
def tiny(monkeypatch):
    """{file name: content} of 6 train and 2 test images, which are taken for the originals."""
    random = np.random.default_rng(0)
    arrays = []
    for n in (6, 2):
        arrays += [random.integers(0, 256, (n, 28, 28), np.uint8), np.arange(n, dtype=np.uint8)]
    content = dict(zip(mnist._NAMES, map(idx, arrays), strict=True))
    md5 = tuple(hashlib.md5(c).hexdigest() for c in content.values())
    monkeypatch.setattr(mnist, "_MNIST", mnist._MNIST._replace(md5=md5))
    monkeypatch.setattr(mnist, "_FASHION", mnist._FASHION._replace(md5=md5, system=None))
    return content, arrays


def write(folder, content, pack=gzip.compress, end=".gz"):
    folder.mkdir(parents=True)
    for name, data in content.items():
        (folder / f"{name}{end}").write_bytes(pack(data))
    return folder


@pytest.mark.parametrize(("name", "folder"), [
    ("mnist", "mnist"), ("mnist", "MNIST/raw"),
    ("fashion_mnist", "fashion-mnist"), ("fashion_mnist", "FashionMNIST/raw"),
])
@pytest.mark.parametrize("packed", [True, False])
def test_every_place(tiny, tmp_path, name, folder, packed):
    content, arrays = tiny
    write(tmp_path / folder, content, *(() if packed else (bytes, "")))
    assert sources.SOURCES[name].here(tmp_path)
    data = sources.load(name, tmp_path)
    assert data.train.inputs.shape == (6, 28, 28, 1)
    assert data.train.labels.dtype == np.int32
    np.testing.assert_array_equal(data.train.inputs[..., 0], arrays[0])
    np.testing.assert_array_equal(data.test.inputs[..., 0], arrays[2])
    np.testing.assert_array_equal(data.test.labels, [0, 1])
    assert len(data.classes) == data.num_classes == 10


def test_the_place_of_a_system_package_needs_no_folder(tiny, tmp_path, monkeypatch):
    content, _ = tiny
    place = write(tmp_path / "usr", content)
    monkeypatch.delenv(sources.DATA_VARIABLE, raising=False)
    monkeypatch.setattr(mnist, "_FASHION", mnist._FASHION._replace(system=place))
    assert sources.load("fashion_mnist").train.inputs.shape == (6, 28, 28, 1)


def test_truncated_altered_and_foreign_files(tiny, tmp_path):
    content, _ = tiny
    folder = write(tmp_path / "mnist", content)
    images, labels = (folder / f"{n}.gz" for n in mnist._NAMES[:2])
    whole = images.read_bytes()
    images.write_bytes(whole[:-500])
    with pytest.raises(ff.UsageError, match=rf"train-images.*{len(whole) - 500:,} bytes that cann"):
        sources.load("mnist", tmp_path)
    data = content[mnist._NAMES[0]]
    images.write_bytes(gzip.compress(data[:-1]))
    with pytest.raises(ff.UsageError, match=r"4,719 bytes unpacked.*16 \+ 6 x 28 x 28 = 4,720"):
        sources.load("mnist", tmp_path)
    images.write_bytes(gzip.compress(data[:9]))
    with pytest.raises(ff.UsageError, match=r"9 bytes unpacked"):
        sources.load("mnist", tmp_path)
    images.write_bytes(gzip.compress(data[:-1] + bytes([data[-1] ^ 1])))
    with pytest.raises(ff.UsageError, match=r"train-images-idx3-ubyte.gz, unpacked: md5"):
        sources.load("mnist", tmp_path)
    images.write_bytes(labels.read_bytes())
    with pytest.raises(ff.UsageError, match=r"starts with 00000801, but .* starts with 00000803"):
        sources.load("mnist", tmp_path)
    images.write_bytes(whole)
    labels.unlink()
    with pytest.raises(ff.UsageError, match=r"has no train-labels-idx1-ubyte.gz or train-labels"):
        sources.load("mnist", tmp_path)


@pytest.mark.parametrize(("name", "mean", "std"), [
    ("mnist", 0.1307, 0.3081), ("fashion_mnist", 0.2860, 0.3530),
])
def test_real(name, mean, std):
    data = real.load(name)
    assert data.train.inputs.shape == (60_000, 28, 28, 1)
    assert data.test.inputs.shape == (10_000, 28, 28, 1)
    assert np.bincount(data.train.labels).min() >= 5421
    pixels = data.train.inputs / 255
    assert (data.mean, data.std) == ((mean,), (std,))
    np.testing.assert_allclose((pixels.mean(), pixels.std()), (mean, std), atol=5e-5)
