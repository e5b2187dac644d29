"""Reading datasets, and what is said when they cannot be read."""

import hashlib
import io
import os
import pickle
import re
import tarfile

import numpy as np
import pytest

import fedjax_flat as ff
from fedjax_flat.data import sources
from fedjax_flat.data.sources import cifar


def test_digits():
    data = sources.load("digits")
    assert data.train.inputs.dtype == data.test.inputs.dtype == np.uint8
    assert data.input_shape == (8, 8, 1)
    assert (len(data.train.labels), len(data.test.labels)) == (1442, 355)
    assert data.train.inputs.max() == 16
    assert (np.bincount(data.test.labels) >= 34).all()
    together = {x.tobytes() for x in np.concatenate([data.train.inputs, data.test.inputs])}
    assert len(together) == 1797, "no test image is also a train image"


@pytest.mark.parametrize("name", list(sources.SOURCES))
def test_every_source_says_what_it_needs(name, tmp_path, monkeypatch):
    monkeypatch.delenv("FEDJAX_FLAT_DATA", raising=False)
    source = sources.SOURCES[name]
    for said in (source.about, source.size, source.licence, source.files):
        assert said
        assert "\n" not in said
    whole = f"{name}:nothing" if source.argument else name
    for folder in (None, tmp_path):
        if source.here(folder):
            assert sources.load(whole, folder).name == name
            continue
        with pytest.raises(ff.UsageError, match=r"--data or FEDJAX_FLAT_DATA") as raised:
            sources.load(whole, folder)
        wanted = re.findall(r"[\w-]+(?:[./][\w.-]+)+|[\w-]{4,}/", source.files)
        assert any(place in str(raised.value) for place in wanted), (wanted, str(raised.value))


def cifar_pickle(labels, seed):
    """The bytes of a CIFAR batch with NumPy's old module name, small."""
    rng = np.random.default_rng(seed)
    content = {
        b"labels": labels,
        b"data": rng.integers(0, 256, (len(labels), 3072), np.uint8),
    }
    return pickle.dumps(content, protocol=3).replace(b"numpy._core", b"numpy.core")


@pytest.fixture
def tiny_cifar(monkeypatch):
    """Stand-in files with their own md5s; returns {member: bytes}."""
    names = [*cifar._CIFAR10.train, *cifar._CIFAR10.test]
    files = {name: cifar_pickle([i, 9 - i], i) for i, name in enumerate(names)}
    md5 = lambda x: hashlib.md5(x).hexdigest()
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    spec = cifar._CIFAR10._replace(
        train={n: md5(files[n]) for n in names[:5]},
        test={n: md5(files[n]) for n in names[5:]},
        archive_md5=md5(archive.getvalue()),
    )
    monkeypatch.setattr(cifar, "_CIFAR10", spec)
    return files, archive.getvalue()


def write_folder(root, files):
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_cifar_from_folder_and_archive(tiny_cifar, tmp_path, monkeypatch):
    files, archive = tiny_cifar
    folder = write_folder(tmp_path, files)
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / "cifar-10-python.tar.gz").write_bytes(archive)
    monkeypatch.setenv("FEDJAX_FLAT_DATA", str(tmp_path))
    loaded = [
        sources.load("cifar10", tmp_path),
        sources.load("cifar10", folder),
        sources.load("cifar10"),
        sources.load("cifar10", tmp_path / "archive"),
        sources.load("cifar10", tmp_path / "archive" / "cifar-10-python.tar.gz"),
    ]
    for data in loaded:
        np.testing.assert_array_equal(data.train.labels, [0, 9, 1, 8, 2, 7, 3, 6, 4, 5])
        np.testing.assert_array_equal(data.train.inputs, loaded[0].train.inputs)
    first = pickle.loads(files["data_batch_1"].replace(b"numpy.core", b"numpy._core"))[b"data"]
    # Channels are stored plane by plane: red 32x32, then green, then blue.
    assert loaded[0].train.inputs[0, 2, 5, 1] == first[0, 1024 + 2 * 32 + 5]
    assert loaded[0].train.inputs.dtype == np.uint8


def test_truncated_and_missing_files(tiny_cifar, tmp_path):
    files, archive = tiny_cifar
    with pytest.raises(ff.UsageError, match=r"has no cifar-10-batches-py or cifar-10-py"):
        sources.load("cifar10", tmp_path)
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(archive[:-100])
    with pytest.raises(ff.UsageError, match="truncated or altered"):
        sources.load("cifar10", tmp_path)
    folder = write_folder(tmp_path, files)
    (folder / "data_batch_3").write_bytes(files["data_batch_3"][:-1])
    with pytest.raises(ff.UsageError, match="data_batch_3: md5"):
        sources.load("cifar10", tmp_path)
    os.remove(folder / "data_batch_3")
    with pytest.raises(ff.UsageError, match="lacks data_batch_3"):
        sources.load("cifar10", tmp_path)


def test_no_data_folder_says_what_to_put_where(monkeypatch):
    monkeypatch.delenv("FEDJAX_FLAT_DATA", raising=False)
    with pytest.raises(ff.UsageError, match=r"cifar-100-python.tar.gz.*--data or FEDJAX_FLAT_DATA"):
        sources.load("cifar100")


def test_unknown_dataset():
    with pytest.raises(ff.UsageError, match="Did you mean 'cifar10'"):
        sources.load("cifra10")
    with pytest.raises(ff.UsageError, match="Did you mean 'train'"):
        sources.load("digits").split("trian")


def test_only_arrays_are_unpickled():
    harmful = pickle.dumps({b"data": os.system})
    with pytest.raises(ff.UsageError, match="refused to unpickle"):
        cifar._ArrayUnpickler(io.BytesIO(harmful)).load()


def test_real_cifar10(cifar_dir):
    data = sources.load("cifar10", cifar_dir)
    assert data.train.inputs.shape == (50_000, 32, 32, 3)
    assert set(np.bincount(data.train.labels)) == {5000}
    assert set(np.bincount(data.test.labels)) == {1000}
    mean = data.train.inputs.mean(axis=(0, 1, 2)) / 255
    np.testing.assert_allclose(mean, data.mean, atol=1e-4)
