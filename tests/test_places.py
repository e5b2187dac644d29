"""Pictures of places: sources with a database and queries, and what they refuse."""

import dataclasses
import shutil

import numpy as np
import pytest
import real
import reference_retrieval as ref
from PIL import Image

import fedjax_flat as ff
from fedjax_flat.data import sources
from fedjax_flat.data.sources import omniglot, places, synthetic_streets

SMALL = {"cities": 2, "streets": 2, "side": 8}


@pytest.fixture(scope="module")
def streets():
    return sources.load("synthetic_streets", **SMALL)


# ---- synthetic streets -------------------------------------------------------------------------


def test_streets_are_what_they_say(streets):
    assert streets.task == "retrieval"
    assert streets.train.inputs.shape == (2 * 2 * 4 * 24, 8, 8, 3)
    assert streets.train.labels.dtype == np.float32
    assert [len(streets.parts[p]) for p in ("database", "queries")] == [96, 96]
    assert len(streets.clients) == 2 * 2 * 4
    assert streets.clients[0] == "city0/database-0-0"
    np.testing.assert_array_equal(np.bincount(streets.owners), 24)
    roles = np.array([name.split("/")[1].startswith("query") for name in streets.clients])
    np.testing.assert_array_equal(streets.queries, roles[streets.owners])


def test_a_seed_decides_every_pixel(streets):
    again, other = (sources.load("synthetic_streets", **SMALL, seed=s) for s in (0, 1))
    np.testing.assert_array_equal(streets.train.inputs, again.train.inputs)
    np.testing.assert_array_equal(streets.test.labels, again.test.labels)
    assert (streets.train.inputs != other.train.inputs).mean() > 0.5


def test_every_query_has_a_right_answer_within_25_m(streets):
    asked, kept = streets.split("queries"), streets.split("database")
    positive, negative = ref.pairs_by_radius(asked.labels, kept.labels, 25, 50)
    assert positive.any(1).all()
    assert positive.sum(1).max() <= 6
    assert negative.sum(1).min() >= 96 - 12
    cities = np.repeat([0, 1], 48)  # test0 and test1, alike in both parts
    assert not positive[cities[:, None] != cities].any()


def test_the_same_spot_shows_the_same_houses(streets):
    """A strip is seen where it was photographed: shifted by a metre, its columns shift."""
    strip = synthetic_streets.painted(np.full((4, 3), 120.0), np.random.default_rng(0), 8)
    assert strip.shape == (8, round((240 + 40) * 4 * 8 / 40) - 3, 3)
    light = np.random.default_rng(1)
    found, positions = synthetic_streets.driven(strip, light, 8, night=False)
    assert positions[:, 0].min() >= 0
    assert positions[:, 0].max() <= 240
    assert (np.abs(positions[:, 0] - 10 * (np.arange(24) + 0.5)) <= 3).all()
    # Light multiplies columns by a line; above the cars, a picture follows its view of the strip.
    at = round(positions[7, 0] * 4 * 8 / 40)
    view = strip[:6, at:][:, :32:4].ravel()
    assert np.corrcoef(view, found[7, :6].ravel())[0, 1] > 0.6
    dark, _ = synthetic_streets.driven(strip, np.random.default_rng(1), 8, night=True)
    assert dark.mean() < 0.5 * found.mean()


# ---- positions ---------------------------------------------------------------------------------


def test_distances_within_a_city_survive_32_bits_and_cities_are_far_apart():
    utm = np.array([[683_123.3, 6_149_876.7], [683_126.3, 6_149_880.6], [12.0, 7.0], [90.0, 3.0]])
    found = places.placed(utm, np.array(["b", "b", "a", "a"]))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [[10_078, 0], [10_081, 3.9], [0, 4], [78, 0]])
    apart = np.linalg.norm(utm[0] - utm[1])
    rounded = utm.astype(np.float32)
    assert np.linalg.norm(rounded[0] - rounded[1]) != pytest.approx(apart, abs=0.05)
    assert np.linalg.norm(found[0] - found[1]) == pytest.approx(apart, abs=1e-3)


def _changed(found, **changes):
    return dataclasses.replace(found, **changes)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda d: _changed(d, parts={**d.parts, "database": np.zeros(0, int)}),
         "an empty part 'database'"),
        (lambda d: _changed(d, parts={}), "no part 'database' of the test examples"),
        (lambda d: _changed(d, parts={"database": np.arange(3)}), "no part 'queries'"),
        (lambda d: _changed(d, train=d.train._replace(labels=np.full_like(d.train.labels, np.nan))),
         r"position \[nan, nan\] of train example 0: expected two finite"),
        (lambda d: _changed(d, train=d.train._replace(labels=d.train.labels[:, :1])),
         r"train labels of shape \(384, 1\) and type float32: retrieval expects a whole number"),
        (lambda d: _changed(d, test=d.test._replace(labels=np.zeros(192, np.int32))),
         "one are identities, the other positions"),
    ],
)
def test_what_retrieval_cannot_read(streets, change, sentence):
    with pytest.raises(ff.UsageError, match=sentence):
        ff.data.check_places(change(streets))


# ---- Mapillary SLS -----------------------------------------------------------------------------


def write_mapillary(root, cities=("amman", "cph", "manila", "zurich"), per=3):
    """The published layout: two sequences in each role of every city, one picture a panorama."""
    random = np.random.default_rng(0)
    for c, city in enumerate(cities):
        for role in ("database", "query"):
            folder = root / "train_val" / city / role
            (folder / "images").mkdir(parents=True)
            tables = {"postprocessed": [",key,easting,northing,unique_cluster,night"],
                      "seq_info": [",key,sequence_key,frame_number"],
                      "raw": [",key,lon,lat,ca,captured_at,pano"]}
            for i in range(2 * per):
                key, sequence = f"{city}{role[0]}{i}", f"{role}{i // per}"
                east, north = 500_000 + 1000 * c + 10 * i, 4_700_000 + 500 * (i // per)
                tables["postprocessed"].append(f"{i},{key},{east}.5,{north}.25,0,False")
                tables["seq_info"].append(f"{i},{key},{sequence},{i}")
                tables["raw"].append(f"{i},{key},0,0,0,2019-01-01,{i == 2 * per - 1}")
                image = random.integers(0, 256, (6, 8, 3)).astype(np.uint8)
                Image.fromarray(image).save(folder / "images" / f"{key}.jpg")
            for name, lines in tables.items():
                (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return root


@pytest.fixture
def mapillary(tmp_path):
    return write_mapillary(tmp_path / "mapillary_sls")


def test_mapillary_by_its_layout(mapillary):
    found = sources.load("mapillary_sls", mapillary.parent, side=4, test_cities=("cph",))
    assert found.train.inputs.shape == (2 * 2 * 5, 4, 4, 3)  # a panorama is left out of each role
    assert found.clients == (
        "amman/database0", "amman/database1", "amman/query0", "amman/query1",
        "zurich/database0", "zurich/database1", "zurich/query0", "zurich/query1",
    )
    np.testing.assert_array_equal(np.bincount(found.owners), [3, 2, 3, 2] * 2)
    np.testing.assert_array_equal(found.queries, np.tile(np.repeat([False, True], 5), 2))
    np.testing.assert_allclose(found.train.labels[:4], [[0, 0], [10, 0], [20, 0], [30, 500]])
    assert found.train.labels[10, 0] - found.train.labels[0, 0] >= 10_000, "another city is far"
    asked, kept = found.split("queries"), found.split("database")
    positive, _ = ref.pairs_by_radius(asked.labels, kept.labels, 0.01, 1)
    np.testing.assert_array_equal(positive, np.eye(5, dtype=bool))
    picture = np.asarray(Image.open(mapillary / "train_val/cph/query/images/cphq0.jpg"))
    assert abs(float(asked.inputs[0].mean()) - float(picture[:, 1:7].mean())) < 12
    other = sources.load("mapillary_sls", mapillary.parent, side=4, test_cities=("manila",),
                         left_out=("cph",))
    assert len(other.clients) == 8


def _text(path, old, new):
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda r: _text(r / "amman/query/postprocessed.csv", "500010.5", "east"),
         r"postprocessed.csv, row 3: easting 'east' of picture ammanq1 is no number"),
        (lambda r: _text(r / "amman/query/postprocessed.csv", "4700000.25", "nan"),
         "northing 'nan' of picture ammanq0 is no number"),
        (lambda r: _text(r / "amman/query/postprocessed.csv", "easting", "x"),
         "expected key, easting, northing in its first line"),
        (lambda r: _text(r / "amman/query/seq_info.csv", "ammanq1,", "other,"),
         "picture ammanq1 has no sequence"),
        (lambda r: (r / "amman/query/seq_info.csv").unlink(), "expected the tables of metadata"),
        (lambda r: (r / "amman/query/images/ammanq0.jpg").unlink(), r"no image .*ammanq0.jpg"),
        (lambda r: shutil.rmtree(r / "cph"), "unknown test city of mapillary_sls 'cph'"),
        (lambda r: _text(r / "cph/database/raw.csv", "False", "True"), "an empty part 'database'"),
        (lambda r: [shutil.rmtree(r / c) for c in ("amman", "zurich")], "no train pictures"),
    ],
)
def test_mapillary_files_that_are_wrong(mapillary, change, sentence):
    change(mapillary / "train_val")
    with pytest.raises(ff.UsageError, match=sentence):
        sources.load("mapillary_sls", mapillary.parent, side=4, test_cities=("cph",))


def test_mapillary_without_some_pictures(mapillary):
    (mapillary / "train_val/amman/query/images/ammanq0.jpg").unlink()
    found = sources.load("mapillary_sls", mapillary.parent, side=4, test_cities=("cph",),
                         skip_unreadable=True)
    assert len(found.train.inputs) == 19
    with pytest.raises(ff.UsageError, match=r"left out city.*Did you mean 'manila'"):
        sources.load("mapillary_sls", mapillary.parent, test_cities=("cph",), left_out=("manil",))


# ---- corridor ----------------------------------------------------------------------------------


def write_corridor(root, count=6):
    random = np.random.default_rng(0)
    for walk in ("query", "ref"):
        (root / "corridor" / walk).mkdir(parents=True)
        for i in range(count):
            image = random.integers(0, 256, (6, 8, 3)).astype(np.uint8)
            Image.fromarray(image).save(root / "corridor" / walk / f"{i:07d}.jpg")
    near = [" ".join(str(j) for j in range(count) if abs(i - j) <= 2) for i in range(count)]
    lines = ["query,references", *(f"{i},{right}" for i, right in enumerate(near))]
    (root / "corridor/ground_truth.csv").write_text("\n".join(lines) + "\n")
    return root


def test_corridor_positions_are_the_published_ground_truth(tmp_path):
    found = sources.load("corridor", write_corridor(tmp_path), clients=2)
    assert found.clients == ("corridor/000", "corridor/001")
    np.testing.assert_array_equal(found.owners, [0, 0, 0, 1, 1, 1])
    asked, kept = found.split("queries"), found.split("database")
    np.testing.assert_array_equal(kept.inputs, found.train.inputs)
    assert (asked.inputs != kept.inputs).any()
    positive, _ = ref.pairs_by_radius(asked.labels, kept.labels, 25, 25)
    i = np.arange(6)
    np.testing.assert_array_equal(positive, np.abs(i[:, None] - i) <= 2)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda r: _text(r / "ground_truth.csv", "5,3 4 5", "5,3 4"),
         r"ground_truth.csv, row 7: 5, 3 4: expected 5,3 4 5"),
        (lambda r: (r / "ground_truth.csv").write_text("query,references\n"), "has no queries"),
        (lambda r: (r / "ref/0000002.jpg").unlink(), r"no .*0000002.jpg: expected 6 pictures"),
        (lambda r: (r / "ref/0000002.jpg").write_bytes(b"no"), "0000002.jpg is no picture"),
        (lambda r: Image.new("RGB", (3, 3)).save(r / "ref/0000001.jpg"), "have 2 sizes"),
    ],
)
def test_corridor_files_that_are_wrong(tmp_path, change, sentence):
    root = write_corridor(tmp_path)
    change(root / "corridor")
    with pytest.raises(ff.UsageError, match=sentence):
        sources.load("corridor", root)


def test_the_real_corridor():
    found = real.load("corridor")
    assert found.train.inputs.shape == (111, 120, 160, 3)
    assert {name: len(where) for name, where in found.parts.items()} == {
        "database": 111, "queries": 111
    }


# ---- Omniglot ----------------------------------------------------------------------------------


def test_alphabets_that_nobody_trained_on(tmp_path, monkeypatch):
    rows = [(a, 2 * a + c, d) for a in range(3) for c in range(2) for d in range(20)]
    alphabet, character, drawer = (np.array(x, np.uint8) for x in zip(*rows, strict=True))
    arrays = {
        "ink": np.zeros((len(rows), 105, 14), np.uint8), "alphabet": alphabet,
        "character": character, "drawer": drawer,
        "alphabet_names": np.array(["Zulu", "Greek", "Latin"]),
        "character_names": np.array([f"c{i}" for i in range(6)]),
    }
    arrays["ink"][np.arange(len(rows)), drawer] = 255
    monkeypatch.setattr(omniglot, "_read", lambda path: arrays)
    monkeypatch.setattr(omniglot.files, "need", lambda *of: None)
    found = sources.load("omniglot_retrieval", tmp_path, unseen=("Greek",), drawers=8)
    assert found.clients == ("Latin/00", "Latin/08", "Latin/16", "Zulu/00", "Zulu/08", "Zulu/16")
    np.testing.assert_array_equal(np.bincount(found.owners), [16, 16, 8] * 2)
    np.testing.assert_array_equal(np.unique(found.train.labels), [0, 1, 4, 5])
    np.testing.assert_array_equal(np.unique(found.test.labels), [2, 3])
    for part, drawers in (("database", range(10)), ("queries", range(10, 20))):
        np.testing.assert_array_equal(found.split(part).labels, np.repeat([2, 3], 10))
        np.testing.assert_array_equal(
            found.parts[part] % 20, np.tile(drawers, 2), err_msg="whole drawers in one part"
        )
    with pytest.raises(ff.UsageError, match=r"unseen alphabet .*'Greec'.*Did you mean 'Greek'"):
        sources.load("omniglot_retrieval", tmp_path, unseen=("Greec",))
    for unseen in ((), ("Zulu", "Greek", "Latin")):
        with pytest.raises(ff.UsageError, match="expected some of the alphabets Zulu, Greek"):
            sources.load("omniglot_retrieval", tmp_path, unseen=unseen)


def test_the_real_alphabets():
    found = real.load("omniglot_retrieval")
    assert (len(found.train.labels), len(found.test.labels)) == (3560, 1280)
    assert len(found.clients) == 24
