"""Streets with a label for every pixel: files of the published layouts, and who owns which."""

import json
import zipfile

import numpy as np
import pytest
import reference_segmentation as ref
from PIL import Image

import fedjax_flat as ff
from fedjax_flat.data.partition.rare_classes import classes_in

FRAMES = {"train": [("0001TP", 5), ("0006R0", 6)], "val": [("0016E5", 10)],
          "test": [("0001TP", 5), ("Seq05VD", 4)]}
SIZE = (6, 8)


def write(folder, *, ending="webp", paths=False):
    """CamVid's layout with tiny pictures; the later list of a drive has its later frames."""
    random, begun = np.random.default_rng(0), {}
    for split, drives in FRAMES.items():
        (folder / split).mkdir(parents=True)
        (folder / f"{split}annot").mkdir()
        lines = []
        for drive, count in drives:
            first = begun.get(drive, 0)
            begun[drive] = first + count
            for i in range(first, first + count):
                name = f"{drive}_{i:06d}"
                image = random.integers(0, 256, (*SIZE, 3)).astype(np.uint8)
                labels = random.integers(0, 12, SIZE).astype(np.uint8)
                Image.fromarray(image).save(folder / split / f"{name}.{ending}", lossless=True)
                Image.fromarray(labels).save(folder / f"{split}annot" / f"{name}.png")
                lines.append(f"/SegNet/CamVid/{split}/{name}.png /SegNet/{name}.png" if paths
                             else name)
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def camvid(tmp_path):
    return write(tmp_path / "camvid")


def test_camvid_by_drive(camvid):
    data = ff.data.load("camvid", camvid.parent)
    assert data.train.inputs.shape == (8 + 5 + 8, *SIZE, 3)
    assert (data.task, data.num_classes, data.clients) == (
        "segmentation", 11, ("0001TP", "0006R0", "0016E5")
    )
    np.testing.assert_array_equal(np.bincount(data.owners), [8, 5, 8])
    sizes = {name: len(where) for name, where in data.parts.items()}
    assert sizes == {"seen": 5, "unseen": 4, "0001TP": 2, "0006R0": 1, "0016E5": 2, "Seq05VD": 4}
    np.testing.assert_array_equal(data.test_owners, [0, 0, 1, 2, 2, -1, -1, -1, -1])
    last = np.asarray(Image.open(camvid / "testannot" / "0001TP_000009.png"))
    np.testing.assert_array_equal(data.test.labels[1], np.where(last == 11, 255, last))
    picture = np.asarray(Image.open(camvid / "test" / "0001TP_000009.webp"))
    np.testing.assert_array_equal(data.split("0001TP").inputs[1], picture)
    with pytest.raises(ff.UsageError, match=r"unknown split 'unsen'.*Did you mean 'unseen'"):
        data.split("unsen")


def test_camvid_from_a_zip_as_published_and_by_other_drives(tmp_path):
    folder = write(tmp_path / "files" / "camvid", ending="png", paths=True)
    (tmp_path / "camvid").mkdir()
    with zipfile.ZipFile(tmp_path / "camvid" / "camvid-240x180.zip", "w") as z:
        for path in sorted(folder.rglob("*.*")):
            z.write(path, path.relative_to(folder.parent))
    zipped = ff.data.load("camvid", tmp_path, split="published")
    plain = ff.data.load("camvid", tmp_path / "files", split="published")
    assert {n: len(w) for n, w in zipped.parts.items()} == {
        "seen": 5, "unseen": 4, "0001TP": 5, "Seq05VD": 4
    }
    for a, b in zip((*zipped.train, *zipped.test), (*plain.train, *plain.test), strict=True):
        np.testing.assert_array_equal(a, b)
    other = ff.data.load("camvid", tmp_path, unseen=("0001TP", "0016E5"))
    assert other.clients == ("0006R0", "Seq05VD")
    assert len(other.parts["unseen"]) == 20


def _save(path, array):
    Image.fromarray(array).save(path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda f: _save(f / "trainannot" / "0001TP_000000.png", np.full(SIZE, 77, np.uint8)),
         "0001TP_000000.png: label 77 is no class and is not ignored: expected 0, 1"),
        (lambda f: _save(f / "trainannot" / "0006R0_000001.png", np.zeros((6, 7), np.uint8)),
         "0006R0_000001.png: labels of 6x7 pixels for 0006R0_000001.webp, a picture of 6x8"),
        (lambda f: _save(f / "trainannot" / "0006R0_000001.png", np.zeros((6, 8, 3), np.uint8)),
         "expected a byte per pixel"),
        (lambda f: (f / "val.txt").write_text("0016E5_999999\n"),
         "val.txt, line 1: no picture 0016E5_999999"),
        (lambda f: (f / "valannot" / "0016E5_000003.png").unlink(),
         "no .*0016E5_000003.png .1 such files."),
        (lambda f: (f / "test.txt").unlink(), "no .*test.txt: expected train.txt"),
        (lambda f: (f / "train" / "0001TP_000001.webp").write_bytes(b"RIFF"),
         "camvid: .*0001TP_000001.webp: cannot identify"),
    ],
)
def test_files_that_are_wrong(camvid, change, text):
    change(camvid)
    with pytest.raises(ff.UsageError, match=text):
        ff.data.load("camvid", camvid.parent)


def test_drives_that_are_wrong(camvid):
    with pytest.raises(ff.UsageError, match=r"unknown drive of camvid 'Seq05'.*Did you mean"):
        ff.data.load("camvid", camvid.parent, unseen=("Seq05",))
    with pytest.raises(ff.UsageError, match="leave some to train on"):
        ff.data.load("camvid", camvid.parent,
                     unseen=("0001TP", "0006R0", "0016E5", "Seq05VD"))


def law(name, data, **options):
    found = ff.data.PARTITIONS.find(name)
    settings = {n: s.default for n, s in found.settings.items()} | options
    return found.make(data, None, **settings)


def test_uniform_over_drives(camvid):
    data = ff.data.load("camvid", camvid.parent)
    partition = law("stratified", data, clients=4)
    partition.check(21)
    counts = np.array([np.bincount(data.owners[partition.client(k)], minlength=3)
                       for k in range(4)])
    assert np.ptp(counts, axis=0).max() <= 1
    assert np.ptp(counts.sum(1)) <= 1
    assert counts.sum() == 21


@pytest.mark.parametrize("seed", range(5))
def test_rare_classes_against_algorithm_8(seed):
    random = np.random.default_rng(seed)
    share = np.array([0.9, 0.5, 0.3, 0.1, 0.05])
    has = random.random((60, 5)) < share[None]
    has[:3] = False
    sizes = random.multinomial(60, np.ones(7) / 7).tolist()
    partition = ff.data.partition.rare_classes(has, sizes, seed=seed)
    partition.check(60)
    lists = [partition.client(k).tolist() for k in range(7)]
    assert partition.sizes.tolist() == sizes
    assert ref.class_imbalance_fault(has, sizes, lists) is None


def test_rare_classes_of_labels(camvid):
    data = ff.data.load("camvid", camvid.parent)
    labels = np.where(data.train.labels == 3, 255, data.train.labels)
    np.testing.assert_array_equal(classes_in(labels, 11), ref.classes_in(labels, 11))
    partition = law("rare_classes", data, clients=5, natural_sizes=True)
    assert partition.sizes.tolist() == law("natural", data, resize_to=5).sizes.tolist()
    with pytest.raises(ff.UsageError, match="at most as many"):
        ff.data.partition.rare_classes(np.ones((3, 2), bool), [2, 2], seed=0)
    plain = ff.data.from_arrays(np.zeros((4, 2)), np.arange(4))
    with pytest.raises(ff.UsageError, match="needs labels of pixels; arrays"):
        law("rare_classes", plain)
    with pytest.raises(ff.UsageError, match="has no owners"):
        law("stratified", plain)


def pictures(folder, rows, *, ending="png", values=34):
    """(picture, labels) files below two folders."""
    random = np.random.default_rng(1)
    for image, labels in rows:
        for path in (folder / image, folder / labels):
            path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (4, 8, 3)).astype(np.uint8)).save(folder / image)
        Image.fromarray(random.integers(0, values, (4, 8)).astype(np.uint8)).save(folder / labels)


def of_city(split, city, i):
    stem = f"{split}/{city}/{city}_00000{i}_000019"
    return f"leftImg8bit/{stem}_leftImg8bit.png", f"gtFine/{stem}_gtFine_labelIds.png"


def test_cityscapes_and_its_lists(tmp_path):
    root = tmp_path / "cityscapes"
    cities = [("train", "ulm", 3), ("train", "erfurt", 4), ("val", "munster", 2)]
    pictures(root, [of_city(s, c, i) for s, c, n in cities for i in range(n)])
    data = ff.data.load("cityscapes", tmp_path, size=(4, 8))
    assert (data.clients, data.num_classes, len(data.classes)) == (("erfurt", "ulm"), 19, 19)
    assert {n: len(w) for n, w in data.parts.items()} == {"unseen": 2, "munster": 2}
    raw = np.asarray(Image.open(root / of_city("train", "erfurt", 0)[1]))
    expected = np.full(raw.shape, 255)
    for c, number in enumerate((7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31,
                                32, 33)):
        expected[raw == number] = c
    np.testing.assert_array_equal(data.train.labels[0], expected)
    cut = lambda pair: tuple(p.split("/", 1)[1] for p in pair)
    users = {"erfurt0": [("erfurt", 1), ("erfurt", 2)], "mixed": [("ulm", 0), ("erfurt", 3)]}
    lists = root / "uniform" / "train"
    lists.mkdir(parents=True)
    table = {"user_data": {user: dict(zip("xy", zip(*(cut(of_city("train", *row)) for row in rows),
                                                  strict=True), strict=True))
                           for user, rows in users.items()}}
    (lists / "all_data_0.json").write_text(json.dumps(table))
    listed = ff.data.load("cityscapes", tmp_path, size=(4, 8), lists="uniform")
    assert listed.clients == ("erfurt0", "mixed")
    np.testing.assert_array_equal(listed.owners, [0, 0, 1, 1])
    np.testing.assert_array_equal(listed.train.labels[0], data.train.labels[1])
    (root / of_city("train", "ulm", 0)[0]).unlink()
    with pytest.raises(ff.UsageError, match=r"all_data_0.json, client mixed: no picture .*ulm_0"):
        ff.data.load("cityscapes", tmp_path, size=(4, 8), lists="uniform")
    (lists / "all_data_0.json").write_text("{}")
    with pytest.raises(ff.UsageError, match="not as FedDrive writes it"):
        ff.data.load("cityscapes", tmp_path, size=(4, 8), lists="uniform")
    with pytest.raises(ff.UsageError, match=r"has no \*.json"):
        ff.data.load("cityscapes", tmp_path, size=(4, 8), lists="heterogeneous")


@pytest.mark.parametrize(
    ("unseen", "hidden"),
    [("country", ["T07_CN_A"]), ("rainy", ["T01_HRN_A"]), ("bus", ["T01_CN_B"])],
)
def test_idda_by_domain(tmp_path, unseen, hidden):
    domains = ["T01_CN_A", "T01_CN_B", "T01_HRN_A", "T07_CN_A"]
    pictures(tmp_path / "idda" / "IDDAsmall", [
        (f"{d}/RGB/{i}_{d}.jpg", f"{d}/Semantic/{i}_{d}.png") for d in domains for i in range(5)
    ], values=24)
    data = ff.data.load("idda", tmp_path, setting=unseen, size=(4, 8))
    assert data.clients == tuple(d for d in domains if d not in hidden)
    assert len(data.train.labels) == 12
    assert (len(data.parts["seen"]), len(data.parts["unseen"])) == (3, 5)
    np.testing.assert_array_equal(np.sort(data.test_owners), [-1] * 5 + [0, 1, 2])
    assert data.num_classes == 16
    first = f"{data.clients[0]}/Semantic/0_{data.clients[0]}.png"
    raw = np.asarray(Image.open(tmp_path / "idda" / "IDDAsmall" / first))
    names = {1: "building", 4: "person", 7: "road", 10: "car", 13: "light", 16: "bicycle"}
    for value, label in zip(raw.ravel(), data.train.labels[0].ravel(), strict=True):
        assert value not in names or data.classes[label] == names[value]
        assert value not in (0, 3, 14, 15, 21, 22, 23) or label == 255


def test_gta5(tmp_path):
    pictures(tmp_path / "gta5", [(f"images/{i:05d}.png", f"labels/{i:05d}.png") for i in range(5)])
    data = ff.data.load("gta5", tmp_path, size=(2, 4))
    assert (data.train.inputs.shape, len(data.test.labels)) == ((4, 2, 4, 3), 1)
    again = ff.data.load("gta5", tmp_path, size=(2, 4))  # from the cache
    np.testing.assert_array_equal(again.train.labels, data.train.labels)
    few = ff.data.load("gta5", tmp_path, size=(2, 4), classes=13)
    assert few.num_classes == 13
    for c, name in enumerate(data.classes):
        of_13 = few.classes.index(name) if name in few.classes else 255
        assert (few.train.labels[data.train.labels == c] == of_13).all()
    assert set(data.classes) - set(few.classes) == {
        "wall", "fence", "pole", "terrain", "truck", "train"
    }


def lists(folder, users):
    folder.mkdir(parents=True)
    (folder / "all_data_0.json").write_text(json.dumps(
        {"user_data": {user: dict(zip("xy", both, strict=False)) for user, both in users.items()}}
    ))


def test_crosscity_and_its_lists(tmp_path):
    root = tmp_path / "crosscity"
    for city, count in (("Rio", 3), ("Rome", 2)):
        for i in range(count):
            pictures(root, [(f"{city}/Images/Train/pano_{i}_0.jpg", "x/x.png")])
        pictures(root, [(f"{city}/Images/Test/pano_9_0.png",
                         f"{city}/Labels/Test/pano_9_0_eval.png")])
    data = ff.data.load("crosscity", tmp_path, size=(4, 8))
    assert (data.clients, data.num_classes) == (("Rio", "Rome"), 13)
    np.testing.assert_array_equal(data.owners, [0, 0, 0, 1, 1])
    assert (data.train.labels == 255).all()
    assert {n: len(w) for n, w in data.parts.items()} == {"seen": 2, "Rio": 1, "Rome": 1}
    raw = np.asarray(Image.open(root / "Rome/Labels/Test/pano_9_0_eval.png"))
    numbers = (7, 8, 11, 19, 20, 21, 23, 24, 25, 26, 28, 32, 33)  # as LADD's program has them
    expected = np.full(raw.shape, 255)
    for c, number in enumerate(numbers):
        expected[raw == number] = c
    np.testing.assert_array_equal(data.split("Rome").labels[0], expected)
    with pytest.raises(ff.UsageError, match=r"ladd.train has no \*.json: put the lists of"):
        ff.data.load("crosscity", tmp_path, size=(4, 8), lists="ladd")
    train = lambda *numbers: [[f"Rio/Images/Train/pano_{i}_0.jpg" for i in numbers]]
    lists(root / "ladd" / "train", {"Rio1": train(2), "Rio2": train(0, 1)})
    lists(root / "ladd" / "test", {"test_user": [
        ["Rio/Images/Test/pano_9_0.png"], ["Rio/Labels/Test/pano_9_0_eval.png"]]})
    listed = ff.data.load("crosscity", tmp_path, size=(4, 8), lists="ladd")
    assert listed.clients == ("Rio1", "Rio2")
    np.testing.assert_array_equal(listed.owners, [0, 1, 1])
    assert (listed.train.labels == 255).all()
    np.testing.assert_array_equal(listed.train.inputs[0], data.train.inputs[2])
    assert set(listed.parts) == {"seen", "Rio"}
    (root / "ladd" / "test" / "all_data_0.json").unlink()
    (root / "ladd" / "test").rmdir()
    lists(root / "ladd" / "test", {"test_user": train(0)})
    with pytest.raises(ff.UsageError, match=r"not as FedDrive writes it .KeyError: 'y'"):
        ff.data.load("crosscity", tmp_path, size=(4, 8), lists="ladd")


@pytest.mark.parametrize("labels", ["labels", "v1.2/labels"])
def test_mapillary_and_its_lists(tmp_path, labels):
    root = tmp_path / "mapillary"
    rows = [(f"{split}/images/{name}.jpg", f"{split}/{labels}/{name}.png")
            for split, names in (("training", "abc"), ("validation", "d")) for name in names]
    pictures(root, rows, values=66)
    data = ff.data.load("mapillary", tmp_path, size=(4, 8))
    assert (len(data.train.labels), len(data.test.labels), data.num_classes) == (3, 1, 19)
    names = {13: "road", 2: "sidewalk", 44: "pole", 48: "light", 26: "terrain", 21: "rider",
             58: "train", 61: "truck", 52: "bicycle"}
    for i, (_, file) in enumerate(rows[:3]):
        raw = np.asarray(Image.open(root / file))
        for value, label in zip(raw.ravel(), data.train.labels[i].ravel(), strict=True):
            assert value not in names or data.classes[label] == names[value]
            assert value not in (0, 16, 18, 49, 65) or label == 255
    lists(root / "ladd" / "train", {"AF0": zip(*rows[:1], strict=True),
                                    "EU12": zip(*rows[1:3], strict=True)})
    lists(root / "ladd" / "test", {"test_user": zip(*rows[3:], strict=True)})
    listed = ff.data.load("mapillary", tmp_path, size=(4, 8), lists="ladd")
    assert listed.clients == ("AF0", "EU12")
    np.testing.assert_array_equal(listed.train.labels, data.train.labels)
    assert set(listed.parts) == {"unseen", "validation"}
    _save(root / rows[0][1], np.full((4, 8), 70, np.uint8))
    with pytest.raises(ff.UsageError, match=r"a.png: label 70 is no class and is not ignored"):
        ff.data.load("mapillary", tmp_path, size=(4, 8))
