"""Streets with a label for every pixel: files of the published layouts, and who owns which."""

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
    with pytest.raises(ff.UsageError, match="needs labels of pixels; digits"):
        law("rare_classes", ff.data.load("digits"))
    with pytest.raises(ff.UsageError, match="has no owners"):
        law("stratified", ff.data.load("digits"))
