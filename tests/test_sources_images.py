"""Folders of pictures: layouts, decoding, the cache, and what is said of files that are wrong."""

import errno
import io
import json
import logging
import os

import numpy as np
import pytest
from PIL import Image

import fedjax_flat as ff
from fedjax_flat.data import sources
from fedjax_flat.data.sources import decode

RED, GREEN, BLUE = (200, 10, 30), (0, 250, 5), (7, 8, 255)


def save(path, colour=RED, size=(6, 4)):
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = "L" if isinstance(colour, int) else "RGB"
    quality = {"quality": 95} if path.suffix == ".jpg" else {}
    Image.new(mode, size, colour).save(path, **quality)


@pytest.fixture(autouse=True)
def no_other_cache(monkeypatch):
    monkeypatch.delenv("FEDJAX_FLAT_CACHE", raising=False)


@pytest.fixture
def pets(tmp_path):
    """Five images of two classes and two clients, of different sizes; returns their folder."""
    folder = tmp_path / "pets"
    save(folder / "a.png", RED)
    save(folder / "b.png", GREEN, (9, 9))
    save(folder / "sub/c.png", BLUE, (3, 8))
    save(folder / "d.png", 77)
    save(folder / "e.png", RED)
    (folder / "all.csv").write_text(
        "File;LABEL;Client;split\na.png;cat;zoe;train\nb.png;dog;ann;Train\n"
        "sub/c.png;dog;zoe;train\n\nd.png;cat;ann;test\ne.png;cat;;TEST\n"
    )
    return folder


def load(folder, **settings):
    return sources.load(f"images:{folder.name}", folder.parent, **{"side": 4, **settings})


def test_one_csv_with_labels_clients_and_splits(pets):
    data = load(pets)
    assert data.train.inputs.shape == (3, 4, 4, 3)
    assert data.train.inputs.dtype == np.uint8
    for image, colour in zip(data.train.inputs, (RED, GREEN, BLUE), strict=True):
        np.testing.assert_array_equal(image, np.broadcast_to(colour, (4, 4, 3)))
    assert np.all(data.test.inputs[0] == 77), "grey becomes RGB"
    assert data.classes == ("cat", "dog")
    np.testing.assert_array_equal(data.train.labels, [0, 1, 1])
    assert data.clients == ("ann", "zoe")
    np.testing.assert_array_equal(data.owners, [1, 0, 1])
    np.testing.assert_array_equal(data.test_owners, [0, -1])
    pixels = np.array([RED, GREEN, BLUE]) / 255
    np.testing.assert_allclose(data.mean, pixels.mean(0), rtol=1e-6)
    np.testing.assert_allclose(data.std, pixels.std(0), atol=1e-5)


def test_the_middle_square_is_kept(tmp_path):
    stripes = np.zeros((4, 8, 3), np.uint8)
    stripes[:, 2:6] = 255
    np.testing.assert_array_equal(
        decode.picture(_png(stripes), decode.Form(4)), np.full((4, 4, 3), 255)
    )
    upright = decode.picture(_png(stripes.transpose(1, 0, 2)), decode.Form(4))
    np.testing.assert_array_equal(upright, np.full((4, 4, 3), 255))
    squeezed = decode.picture(_png(stripes), decode.Form(4, stretch=True))
    assert squeezed[0, 0, 0] < 50 < 200 < squeezed[0, 1, 0], "nothing is cut off"
    gradient = np.arange(64, dtype=np.uint8).reshape(8, 8, 1)
    np.testing.assert_array_equal(
        decode.picture(_png(gradient[..., 0]), decode.Form(0, channels=1)), gradient
    )


def _png(array):
    out = io.BytesIO()
    Image.fromarray(array).save(out, "png")
    return out.getvalue()


def test_large_jpegs_keep_their_middle_and_their_upright(tmp_path):
    picture = np.zeros((512, 1024, 3), np.uint8)
    picture[:, 256:512] = 255  # left half of the middle square
    Image.fromarray(picture).save(tmp_path / "wide.jpg", quality=95)
    small = decode.picture(tmp_path / "wide.jpg", decode.Form(16))
    assert small[:, :7].min() > 220
    assert small[:, 9:].max() < 35
    turned = Image.Exif()
    turned[0x0112] = 6  # the camera was turned: show rotated by 90 degrees
    Image.fromarray(picture).save(tmp_path / "turned.jpg", quality=95, exif=turned)
    small = decode.picture(tmp_path / "turned.jpg", decode.Form(16))
    assert small[:7].min() > 220
    assert small[9:].max() < 35


def test_train_csv_and_test_csv_with_whole_numbers(pets):
    (pets / "all.csv").unlink()
    (pets / "train.csv").write_text("file,label,client\na.png,0,1\nb.png,2,0\n")
    (pets / "test.csv").write_text("label\tfile\n1\td.png\n")
    data = load(pets)
    np.testing.assert_array_equal(data.train.labels, [0, 2])
    np.testing.assert_array_equal(data.test.labels, [1])
    assert data.num_classes == 3
    assert data.test_owners is None


def test_folders_are_classes(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    for part in ("", "train/", "test/"):
        save(tmp_path / f"shop/{part}hat/1.jpg")
        save(tmp_path / f"shop/{part}bag/x/2.PNG", GREEN)
    (tmp_path / "shop/train/bag/notes.txt").write_text("not an image")
    data = load(tmp_path / "shop")
    assert data.classes == ("bag", "hat")
    np.testing.assert_array_equal(data.train.labels, [0, 1])
    assert len(data.test.labels) == 2
    assert data.owners is None
    flat = load(tmp_path / "shop/train")
    assert flat.test is flat.train or np.shares_memory(flat.test.inputs, flat.train.inputs)
    assert "the train images are tested on" in caplog.text


def test_clients_with_test_data_only_are_no_clients(pets, caplog):
    caplog.set_level(logging.INFO)
    text = (pets / "all.csv").read_text()
    (pets / "all.csv").write_text(text.replace("d.png;cat;ann", "d.png;cat;eve"))
    data = load(pets)
    assert data.clients == ("ann", "zoe")
    np.testing.assert_array_equal(data.test_owners, [-1, -1])
    assert "1 clients have test examples only" in caplog.text


def caches(folder):
    return sorted((folder / ".fedjax_flat_cache").glob("*"))


def test_the_cache_is_read_again_and_made_anew_when_a_file_changes(pets, monkeypatch):
    first = load(pets)
    assert len(caches(pets)) == 2
    assert isinstance(first.train.inputs, np.memmap)
    monkeypatch.setattr(decode, "picture", None)  # nothing is decoded
    again = load(pets)
    np.testing.assert_array_equal(again.train.inputs, first.train.inputs)
    monkeypatch.undo()
    save(pets / "a.png", BLUE)
    os.utime(pets / "a.png", ns=(1, 1))
    assert tuple(load(pets).train.inputs[0, 0, 0]) == BLUE
    assert load(pets, side=5).train.inputs.shape == (3, 5, 5, 3)


def test_the_cache_may_be_elsewhere(pets, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDJAX_FLAT_CACHE", str(tmp_path / "scratch"))
    load(pets)
    assert not caches(pets)
    assert len(list((tmp_path / "scratch").glob("*.npy"))) == 2
    moved = pets.rename(tmp_path / "moved")
    monkeypatch.setattr(decode, "picture", None)
    assert len(load(moved).train.labels) == 3, "a folder that moved keeps its cache"


def test_a_full_disk_leaves_nothing(pets, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ff.UsageError, match=r"No space left.*nothing was left.*FEDJAX_FLAT_CACHE"):
        load(pets)
    assert not caches(pets)


def test_a_damaged_cache_is_named(pets):
    load(pets)
    for path in caches(pets):
        np.save(path, np.zeros((1, 2), np.uint8))
    with pytest.raises(ff.UsageError, match=r"holds uint8 of shape \(1, 2\).*Delete it"):
        load(pets)


def test_unreadable_images_are_counted_and_named(pets, caplog, monkeypatch):
    (pets / "b.png").write_bytes(b"no picture")
    (pets / "sub/c.png").write_bytes((pets / "sub/c.png").read_bytes()[:40])
    with pytest.raises(ff.UsageError, match=r"2 unreadable images: .*b.png, .*c.png.*skip_unread"):
        load(pets)
    assert not caches(pets)
    data = load(pets, skip_unreadable=True)
    assert "2 unreadable images" in caplog.text
    assert len(data.train.inputs) == len(data.train.labels) == 1
    assert data.clients == ("zoe",), "ann's only image cannot be read"
    np.testing.assert_array_equal(data.test_owners, [-1, -1])
    monkeypatch.setattr(decode, "picture", None)
    assert len(load(pets, skip_unreadable=True).train.labels) == 1, "from the cache"
    monkeypatch.undo()
    (pets / "a.png").write_bytes(b"")
    with pytest.raises(ff.UsageError, match="none of 3 images can be read"):
        load(pets, skip_unreadable=True)


def test_rows_without_their_image(pets, caplog):
    (pets / "b.png").unlink()
    (pets / "sub/c.png").unlink()
    with pytest.raises(ff.UsageError, match=r"all.csv, row 3: no image .*b.png \(2 such rows\)"):
        load(pets)
    assert len(load(pets, skip_unreadable=True).train.labels) == 1
    assert "2 such rows). Left out" in caplog.text


@pytest.mark.parametrize(("text", "says"), [
    ("file,label\n,1\n", "row 2: no file"),
    ("file,label\na.png,\n", r"row 2: no label for a.png \(1 such rows\)"),
    ("file,label\na.png,1\nb.png,-3\n", "row 3: label '-3' of b.png is no class.*0 or more"),
    ("file,label,client\na.png,1,x\nb.png,1,\n", "row 3: no client for b.png"),
    ("file,label,split\na.png,1,valid\n", "row 2: split 'valid': expected train or test"),
    ("file,lable\na.png,1\n", "has the columns file, lable: expected file, label.*'lable'"),
    ("file,label\na,b.png,1\n", "row 2 has 3 cells, the header 2"),
    ("", r"has the columns \(none\)"),
    ("file,label\n", "no train images"),
    ("file,label,split\na.png,1,test\n", "no train images"),
])
def test_wrong_tables(pets, text, says):
    (pets / "all.csv").write_text(text)
    with pytest.raises(ff.UsageError, match=says):
        load(pets)


def test_wrong_folders(pets, tmp_path):
    with pytest.raises(ff.UsageError, match=r"no .*/nowhere.*FOLDER/train.csv.*inside the data"):
        load(tmp_path / "nowhere")
    with pytest.raises(ff.UsageError, match=r"is a file; expected a folder"):
        load(pets / "a.png")
    (pets / "more.csv").write_text("file,label\n")
    with pytest.raises(ff.UsageError, match=r"has all.csv, more.csv: expected train.csv"):
        load(pets)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ff.UsageError, match=r"has no CSV and no sub-folders with images"):
        load(tmp_path / "empty")
    (pets / "all.csv").write_bytes("file,label\nä.png,1\n".encode("latin-1"))
    (pets / "more.csv").unlink()
    with pytest.raises(ff.UsageError, match="not a text in UTF-8"):
        load(pets)
    with pytest.raises(ff.UsageError, match="side = 0: expected 1 or more"):
        load(pets, side=0)
    with pytest.raises(ff.UsageError, match="expected images:FOLDER"):
        sources.load("images")


@pytest.fixture
def landmarks(tmp_path):
    root = tmp_path / "landmarks"
    save(root / "train/0/a/f/0af1.jpg", RED)
    save(root / "images/77bc.jpg", GREEN)
    save(root / "train/1/2/3/1234.jpg", BLUE)
    bundle = root / "landmarks-user-160k"
    bundle.mkdir()
    (bundle / "federated_train.csv").write_text(
        "user_id,image_id,class\n9,0af1,2027\n10,77bc,0\n"
    )
    (bundle / "test.csv").write_text("image_id,class\n1234,5\n")
    return bundle


def test_landmarks(landmarks, tmp_path):
    data = sources.load("landmarks", tmp_path, side=8)
    assert data.num_classes == 2028
    np.testing.assert_array_equal(data.train.labels, [2027, 0])
    assert data.clients == ("10", "9")
    np.testing.assert_array_equal(data.owners, [1, 0])
    assert data.test_owners is None
    np.testing.assert_allclose(data.test.inputs[0, 3, 3].astype(int), BLUE, atol=6)
    assert data.mean == data.std == (0.5, 0.5, 0.5)


def test_wrong_landmarks(landmarks, tmp_path):
    table = landmarks / "federated_train.csv"
    text = table.read_text()
    for wrong, says in (
        ("10,77bc,2028", "row 3: label '2028' of 77bc.jpg is no class: expected 0 to 2027"),
        (",77bc,0", "row 3: no user_id for 77bc.jpg"),
        ("10,abcdef,0", "row 3: no image .*train/a/b/c/abcdef.jpg"),
    ):
        table.write_text(text.replace("10,77bc,0", wrong))
        with pytest.raises(ff.UsageError, match=says):
            sources.load("landmarks", tmp_path, side=8)
    table.write_text(text)
    (landmarks / "test.csv").rename(landmarks / "other.csv")
    with pytest.raises(ff.UsageError, match=r"no .*test.csv: expected the test list"):
        sources.load("landmarks", tmp_path)
    table.unlink()
    with pytest.raises(ff.UsageError, match=r"has .*other.csv: expected .*landmarks-user-160k.zip"):
        sources.load("landmarks", tmp_path)
    with pytest.raises(ff.UsageError, match=r"landmarks: .* has no landmarks"):
        sources.load("landmarks", landmarks)


def test_inaturalist(tmp_path):
    root = tmp_path / "inaturalist"
    for i, colour in enumerate((RED, GREEN, BLUE)):
        save(root / f"train_val_images/Aves/Pica pica/id{i}.jpg", colour)
    tables = {
        "inaturalist-user-120k/federated_train_user_120k.csv": "ann",
        "inaturalist-geo/federated_train_geo_100.csv": "cell",
        "inaturalist-geo/federated_train_geo_1k.csv": "region",
    }
    for name, client in tables.items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"user_id,image_id,class,label\n{client},id0,1202,4000\n")
        (path.parent / "test.csv").write_text("image_id,class,label\nid2,3,17\n")
    for split, client in (("users_120k", "ann"), ("geo_100", "cell"), ("geo_1k", "region")):
        data = sources.load("inaturalist", tmp_path, split=split, side=8)
        assert data.clients == (client,)
        np.testing.assert_array_equal(data.train.labels, [1202])
        np.testing.assert_array_equal(data.test.labels, [3])
    with pytest.raises(ff.UsageError, match=r"expected the train list of this split.*geo.zip"):
        sources.load("inaturalist", tmp_path, split="geo_3k")
    with pytest.raises(ff.UsageError, match=r"expected one of users_120k, geo_100"):
        sources.load("inaturalist", tmp_path, split="geo_10")
    (root / "iNaturalist_train.csv").write_text(
        "image_id,class,user_120k,geo_3k\nid0,1,ann,NA\nid1,2,eva,south\n"
    )
    (root / "iNaturalist_test.csv").write_text("image_id,class\nid2,3\n")
    assert sources.load("inaturalist", tmp_path, split="geo_3k", side=8).clients == ("south",)


def test_celeba_as_leaf_writes_it(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    data_ = tmp_path / "celeba/data"
    for i, colour in enumerate((RED, GREEN, BLUE)):
        save(data_ / f"raw/img_align_celeba/00000{i}.jpg", colour, (178, 218))
    for part, users in (
        ("train", {"27": {"x": ["000000.jpg"], "y": [1]}}),
        ("test", {"27": {"x": ["000001.jpg"], "y": [0]}, "31": {"x": ["000002.jpg"], "y": [1]}}),
    ):
        (data_ / part).mkdir()
        content = {"users": list(users), "num_samples": [1], "user_data": users}
        (data_ / part / f"{part}_0.json").write_text(json.dumps(content))
    data = sources.load("celeba", tmp_path)
    assert data.input_shape == (84, 84, 3)
    np.testing.assert_array_equal(data.train.labels, [1])
    np.testing.assert_array_equal(data.test.labels, [0, 1])
    np.testing.assert_array_equal(data.test_owners, [0, -1])
    assert data.clients == ("27",)
    assert "1 clients have test examples only" in caplog.text

    table = data_ / "train" / "train_0.json"
    table.write_text(json.dumps({"user_data": {"27": {"x": ["000000.jpg"], "y": []}}}))
    with pytest.raises(ff.UsageError, match=r"train_0.json: not as LEAF writes it"):
        sources.load("celeba", tmp_path)
    table.write_text(json.dumps({"user_data": {"27": {"x": ["000000.jpg"], "y": [2]}}}))
    with pytest.raises(ff.UsageError, match=r"user 27, image 0: label '2' .*expected 0 to 1"):
        sources.load("celeba", tmp_path)
    table.unlink()
    with pytest.raises(ff.UsageError, match=r"has no \*.json"):
        sources.load("celeba", tmp_path)
