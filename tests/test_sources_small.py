"""Omniglot's writers and the four hospitals of heart disease."""

import numpy as np
import pytest
import real

import fedjax_flat as ff
from fedjax_flat.data import sources
from fedjax_flat.data.sources import heart, omniglot


def drawings():
    """Two alphabets of two and one characters, drawn by ten each."""
    random = np.random.default_rng(0)
    rows = [(0, c, d) for c in (0, 1) for d in range(10)] + [(1, 2, d) for d in range(10)]
    alphabet, character, drawer = (np.array(x, np.uint8) for x in zip(*rows, strict=True))
    ink = random.random((30, 105, 105)) < 0.2
    return ink, {
        "ink": np.packbits(ink, axis=-1), "alphabet": alphabet, "character": character,
        "drawer": drawer, "alphabet_names": np.array(["Zulu", "Greek"]),
        "character_names": np.array(["z1", "z2", "g1"]),
    }


def write_npz(root, arrays):
    path = root / "omniglot/omniglot-small.npz"
    path.parent.mkdir(exist_ok=True)
    np.savez(path, **arrays)
    return path


def test_writers_are_clients_and_some_are_held_out(tmp_path):
    ink, arrays = drawings()
    write_npz(tmp_path, arrays)
    data = sources.load("omniglot", tmp_path, side=105)
    assert len(data.clients) == 16
    assert data.clients[0] == "Greek 00"
    assert "Zulu 04" not in data.clients
    kept = arrays["drawer"] % 5 != 4
    np.testing.assert_array_equal(data.train.inputs[..., 0], 255 * ink[kept])
    np.testing.assert_array_equal(data.test.labels, [0, 0, 1, 1, 2, 2])
    np.testing.assert_array_equal(data.test_owners, [-1] * 6)
    assert [data.clients[k] for k in data.owners[:4]] == ["Zulu 00", "Zulu 01", "Zulu 02",
                                                          "Zulu 03"]
    assert data.mean[0] == pytest.approx(ink[kept].mean(), rel=1e-6)
    assert (data.num_classes, data.classes) == (3, ("z1", "z2", "g1"))


def test_shrinking_is_the_mean_over_area(tmp_path):
    """Each pixel repeated 28 times makes 105 divisible: 2940 = 28 x 105."""
    ink, arrays = drawings()
    write_npz(tmp_path, arrays)
    data = sources.load("omniglot", tmp_path)
    assert data.train.inputs.shape == (24, 28, 28, 1)
    fine = np.kron(ink[0], np.ones((28, 28)))
    means = fine.reshape(28, 105, 28, 105).mean(axis=(1, 3))
    np.testing.assert_allclose(data.train.inputs[0, ..., 0], 255 * means, atol=0.5 + 1e-9)
    halves = omniglot.shrink(np.array([[[1, 0], [1, 1]]], np.uint8), 1)
    np.testing.assert_array_equal(halves, [[[191]]])  # 3/4 of 255


def test_damaged_drawings(tmp_path):
    _, arrays = drawings()
    path = write_npz(tmp_path, {k: v for k, v in arrays.items() if k != "drawer"})
    with pytest.raises(ff.UsageError, match="lacks drawer: expected ink, alphabet"):
        sources.load("omniglot", tmp_path)
    write_npz(tmp_path, {**arrays, "ink": arrays["ink"][:, :, :13]})
    with pytest.raises(ff.UsageError, match=r"ink of shape \(30, 105, 13\) for 30 characters"):
        sources.load("omniglot", tmp_path)
    write_npz(tmp_path, arrays)
    whole = path.read_bytes()
    for damaged in (whole[:-40], b"text"):
        path.write_bytes(damaged)
        with pytest.raises(ff.UsageError, match=rf"{len(damaged):,} bytes that are no whole .npz"):
            sources.load("omniglot", tmp_path)


def rows(count, seed, *, header=True, missing="?"):
    """Lines of a hospital: targets 0 and 1 in turn, feature 0 is the row's number."""
    random = np.random.default_rng(seed)
    values = random.normal(50, 10, (count, 13)).round(1)
    lines = [[*map(str, row), str(i % 2)] for i, row in enumerate(values)]
    lines[0][11] = missing
    names = [",".join([*heart.FEATURES, "target"])] if header else []
    return values, [*names, *map(",".join, lines)]


@pytest.fixture
def hospitals(tmp_path):
    folder = tmp_path / "heart"
    folder.mkdir()
    values = {}
    for i, name in enumerate(heart.HOSPITALS):
        # UCI's own files have no line of names.
        values[name], lines = rows(10 * (i + 1), i, header=i > 0, missing="?" if i % 2 else "")
        (folder / f"processed.{name}.data").write_text("\n".join(lines) + "\n")
    return tmp_path, values


def test_hospitals(hospitals):
    root, values = hospitals
    data = sources.load("heart", root)
    assert data.clients == heart.HOSPITALS
    np.testing.assert_array_equal(np.bincount(data.owners), [8, 16, 24, 32])
    np.testing.assert_array_equal(np.bincount(data.test_owners), [2, 4, 6, 8])
    for k in range(4):  # every hospital is split class by class
        assert set(np.bincount(data.test.labels[data.test_owners == k])) == {k + 1}
    assert data.train.inputs.dtype == np.float32
    np.testing.assert_allclose(data.train.inputs.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(data.train.inputs.std(0), 1, atol=1e-5)
    # Undo it with one column: every row is there once, in train or test.
    ages = np.concatenate([values[h][:, 0] for h in heart.HOSPITALS])
    found = np.concatenate([data.train.inputs[:, 0], data.test.inputs[:, 0]])
    scale = (ages.max() - ages.min()) / (found.max() - found.min())
    np.testing.assert_allclose(
        np.sort(found * scale), np.sort(ages) - ages.max() + found.max() * scale, atol=1e-3)


def test_what_is_missing_is_the_median(hospitals):
    root, values = hospitals
    path = root / "heart/processed.va.data"
    lines = path.read_text().splitlines()
    for i in range(1, len(lines)):  # no cholesterol
        cells = lines[i].split(",")
        cells[4] = "0"
        lines[i] = ",".join(cells)
    path.write_text("\n".join(lines))
    data = sources.load("heart", root)
    imputed = data.train.inputs[data.owners == 3, 4]
    assert np.ptp(imputed) == 0
    others = data.train.inputs[data.owners < 3, 4]
    assert imputed[0] == pytest.approx(np.median(others), abs=1e-5)
    features, _ = heart.read(root / "heart/processed.cleveland.data")
    assert np.isnan(features).sum() == 1
    np.testing.assert_allclose(np.delete(features, 11, 1), np.delete(values["cleveland"], 11, 1))


def test_severity_has_the_same_split(hospitals):
    root, _ = hospitals
    path = root / "heart/processed.va.data"
    path.write_text(path.read_text().replace(",1\n", ",3\n").replace(",3\n", ",2\n", 12))
    binary, severity = (sources.load("heart", root, target=t) for t in ("binary", "severity"))
    np.testing.assert_array_equal(binary.test.inputs, severity.test.inputs)
    np.testing.assert_array_equal(binary.test.labels, severity.test.labels > 0)
    assert (binary.num_classes, severity.num_classes) == (2, 5)
    assert set(severity.train.labels) == {0, 1, 2, 3}


@pytest.mark.parametrize(("line", "message"), [
    ("1,2,3", r"va.data: line 42 is '1,2,3': expected 13 numbers"),
    (",".join(["1"] * 13 + ["7"]), "a target from 0 to 4"),
    (",".join(["1"] * 13 + ["?"]), "a target from 0 to 4"),
    (",".join(["old"] + ["1"] * 13), "line 42 is 'old,1"),
])
def test_wrong_rows(hospitals, line, message):
    root, _ = hospitals
    path = root / "heart/processed.va.data"
    path.write_text(path.read_text() + line)
    with pytest.raises(ff.UsageError, match=message):
        sources.load("heart", root)


def test_files_without_patients_or_a_feature(hospitals):
    root, _ = hospitals
    paths = [root / f"heart/processed.{name}.data" for name in heart.HOSPITALS]
    for path in paths:
        lines = [line.split(",") for line in path.read_text().splitlines()]
        path.write_text("\n".join(",".join([*c[:12], "", c[13]]) for c in lines))
    with pytest.raises(ff.UsageError, match="no train row of any hospital has thal"):
        sources.load("heart", root)
    paths[1].write_text("")
    with pytest.raises(ff.UsageError, match=r"hungarian.data has no patient"):
        sources.load("heart", root)
    paths[1].unlink()
    with pytest.raises(ff.UsageError, match=r"has no heart/processed.hungarian.data"):
        sources.load("heart", root)


def test_real_omniglot():
    data = real.load("omniglot")
    assert data.train.inputs.shape == (3872, 28, 28, 1)
    assert len(data.clients) == 128
    assert set(np.bincount(data.train.labels)) == {16}
    assert set(np.bincount(data.test.labels)) == {4}
    assert (np.bincount(data.owners).min(), np.bincount(data.owners).max()) == (17, 47)


def test_real_heart():
    data = real.load("heart")
    assert (len(data.train.labels), len(data.test.labels)) == (736, 184)
    ill = [np.sum(data.train.labels[data.owners == k]) + np.sum(
        data.test.labels[data.test_owners == k]) for k in range(4)]
    assert ill == [139, 106, 115, 149]
    assert np.isfinite(data.train.inputs).all()
    assert np.isfinite(data.test.inputs).all()
