"""CIFAR-C: each corruption against its definition, the published files, our cache, the table."""

import colorsys
import errno
import io
import itertools
import json
import logging

import numpy as np
import pytest
from conftest import small_config
from PIL import Image
from scipy import ndimage

import fedjax_flat as ff
from fedjax_flat import cli
from fedjax_flat.data import corruptions
from fedjax_flat.data.corruptions import CORRUPTIONS, corrupt, corrupted, published, tools
from fedjax_flat.data.sources import SOURCES
from fedjax_flat.experiment.config import to_json
from fedjax_flat.report.robustness import robustness

# Those of which the published parameters grow in every respect.
GROWING = ("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise", "gaussian_blur",
           "defocus_blur", "motion_blur", "zoom_blur", "snow", "fog", "brightness", "contrast",
           "jpeg_compression", "pixelate")


def pictures(count=6, seed=0):
    """Smooth, coloured images of 32x32."""
    random = np.random.default_rng(seed)
    waves = ndimage.gaussian_filter(random.standard_normal((count, 32, 32, 3)), (0, 2, 2, 0))
    waves = waves / np.abs(waves).max((1, 2), keepdims=True)
    return (127 + 120 * waves).astype(np.uint8)


def grey(value, count=20):
    return np.full((count, 32, 32, 3), value, np.uint8)


def difference(name, severity, images):
    return np.abs(corrupt(images, name, severity).astype(int) - images).mean()


def test_there_are_nineteen_with_five_severities():
    assert len(CORRUPTIONS) == 19
    assert all(len(c.parameters) == 5 for c in CORRUPTIONS.values())


@pytest.mark.parametrize("name", list(CORRUPTIONS))
def test_every_image_has_its_own_draws_and_they_stay(name):
    images = pictures(4)
    out = corrupt(images, name, 5)
    assert (out.dtype, out.shape) == (images.dtype, images.shape)
    assert (out != images).any((1, 2, 3)).all(), "every image is changed"
    for severity in (2, 5):  # spatter of water, and of mud
        np.testing.assert_array_equal(
            corrupt(images[:2], name, severity), corrupt(images, name, severity)[:2]
        )
    drawn = name not in ("gaussian_blur", "defocus_blur", "zoom_blur", "brightness", "contrast",
                         "saturate", "jpeg_compression", "pixelate")
    twins = corrupt(np.repeat(images[:1], 2, axis=0), name, 5)
    assert (twins[0] != twins[1]).any() == drawn
    assert (corrupt(images, name, 5, seed=1) != out).any() == drawn
    assert (corrupt(images, name, 3) != out).any()


@pytest.mark.parametrize("name", GROWING)
def test_a_higher_severity_changes_more(name):
    images = pictures(12)
    found = [difference(name, severity, images) for severity in corruptions.SEVERITIES]
    assert all(a < b for a, b in itertools.pairwise(found)), found


@pytest.mark.parametrize(("severity", "deviation"), [(1, 0.04), (5, 0.10)])
def test_gaussian_and_speckle_noise(severity, deviation):
    noise = corrupt(grey(128), "gaussian_noise", severity) / 255
    assert noise.std() == pytest.approx(deviation, rel=0.02)
    assert noise.mean() == pytest.approx(128 / 255 - 0.5 / 255, abs=0.002), "fractions are cut off"
    relative = {1: 0.06, 5: 0.2}[severity]
    for value in (40, 128):
        speckle = corrupt(grey(value), "speckle_noise", severity) / 255
        assert speckle.std() == pytest.approx(relative * value / 255, rel=0.03)


def test_shot_and_impulse_noise():
    for severity, photons in ((1, 500), (5, 50)):
        shot = corrupt(grey(100), "shot_noise", severity) / 255
        assert shot.var() == pytest.approx(100 / 255 / photons, rel=0.05)
    for severity, share in ((1, 0.01), (5, 0.07)):
        out = corrupt(grey(100), "impulse_noise", severity)
        assert set(np.unique(out)) == {0, 100, 255}
        assert (out != 100).mean() == pytest.approx(share, rel=0.1)
        assert (out == 255).sum() == pytest.approx((out == 0).sum(), rel=0.15)


def test_blurs_against_their_definitions():
    images = pictures(2)
    sigma = 0.8
    taps = np.exp(-(np.arange(-3, 4) ** 2) / (2 * sigma**2))
    taps /= taps.sum()
    padded = np.pad(images / 255, ((0, 0), (3, 3), (3, 3), (0, 0)), mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, (7, 7), (1, 2))
    expected = np.einsum("nijcab,a,b->nijc", windows, taps, taps)
    assert np.abs(corrupt(images, "gaussian_blur", 4) - expected * 255).max() <= 1.01
    # A disk of radius 1.5 is nine pixels, and an alias blur of 0.1 does nothing.
    padded = np.pad(images / 255, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2))
    assert np.abs(corrupt(images, "defocus_blur", 5) - windows.mean((4, 5)) * 255).max() <= 1.01
    plus = tools.disk(1, 0.2)
    assert plus.sum() == pytest.approx(1, abs=1e-6)
    assert plus[2, 2] == pytest.approx(0.2, rel=0.01)


def test_motion_is_a_trail_along_an_angle():
    x = np.random.default_rng(0).uniform(size=(3, 9, 11, 2)).astype(np.float32)
    degrees, sigma, radius = np.array([0.0, 30.0, -100.0]), 1.5, 4
    kernel = np.exp(-(np.arange(2 * radius + 1) ** 2) / (2 * sigma**2))
    expected = np.zeros(x.shape)
    for n, row, column in np.ndindex(3, 9, 11):
        for i, weight in enumerate(kernel / kernel.sum()):
            angle = np.radians(degrees[n])
            at = (row + int(np.ceil(i * np.sin(angle) - 0.5)),
                  column + int(np.ceil(i * np.cos(angle) - 0.5)))
            expected[n, row, column] += weight * x[n, min(max(at[0], 0), 8), min(max(at[1], 0), 10)]
    np.testing.assert_allclose(tools.motion(x, radius, sigma, degrees), expected, atol=1e-4)


def test_zoom_blur_against_scipy():
    image = pictures(1)[0] / 255
    factors = np.arange(1, 1.16, 0.01)
    total = image.copy()
    for factor in factors:
        kept = int(np.ceil(32 / factor))
        top = (32 - kept) // 2
        part = image[top : top + kept, top : top + kept]
        large = ndimage.zoom(part, (factor, factor, 1), order=1)
        cut = (large.shape[0] - 32) // 2
        total += large[cut : cut + 32, cut : cut + 32]
    expected = total / (len(factors) + 1) * 255
    assert np.abs(corrupt(pictures(1), "zoom_blur", 3)[0] - expected).max() <= 1.01


def test_glass_blur_takes_pixels_from_neighbours():
    image = np.arange(32 * 32, dtype=np.uint16).reshape(32, 32)
    images = np.stack([image % 251, image // 32 * 8, image % 32 * 8], -1).astype(np.uint8)[None]
    out = corrupt(images, "glass_blur", 1)[0]  # a blur of 0.05 pixels does nothing
    rows, columns = np.mgrid[:32, :32]
    down, right = out[..., 1] // 8 - rows, out[..., 2] // 8 - columns
    assert set(np.unique(down)) == {-1, 0}
    assert set(np.unique(right)) == {-1, 0}
    assert (down[2:, 2:] == -1).mean() == pytest.approx(0.5, abs=0.06)
    np.testing.assert_array_equal(out[:2], images[0, :2])


def test_colours_against_hsv():
    images = pictures(2)
    images[0, :4], images[0, 4:8] = 0, 77  # black, grey
    for name, severity, change in (
        ("brightness", 3, lambda h, s, v: (h, s, min(v + 0.15, 1))),
        ("saturate", 1, lambda h, s, v: (h, 0.3 * s, v)),
        ("saturate", 5, lambda h, s, v: (h, min(2.5 * s + 0.2, 1), v)),
    ):
        out = corrupt(images, name, severity).reshape(-1, 3)
        for pixel, found in zip(images.reshape(-1, 3)[::7], out[::7], strict=True):
            expected = colorsys.hsv_to_rgb(*change(*colorsys.rgb_to_hsv(*(pixel / 255))))
            assert np.abs(found - 255 * np.array(expected)).max() <= 1.01
    contrast = corrupt(images, "contrast", 4)
    mean = images.mean((1, 2), keepdims=True)
    assert np.abs(contrast - (mean + 0.3 * (images - mean))).max() <= 1.01


def test_jpeg_and_pixelate_are_pillows():
    images = pictures(2)
    for k, image in enumerate(images):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=50)
        np.testing.assert_array_equal(
            corrupt(images, "jpeg_compression", 4)[k], np.asarray(Image.open(file))
        )
    few = corrupt(images, "pixelate", 5)
    assert len(np.unique(few[0, :, 0], axis=0)) <= 20, "20 pixels a side"


def test_elastic_transform_of_severity_1_is_affine():
    """Planes stay planes, and on average nothing moves."""
    rows, columns = np.mgrid[:32, :32]
    plane = np.stack([4 * rows + 60, 4 * columns + 60, rows * 0 + 90], -1).astype(np.uint8)
    out = corrupt(np.repeat(plane[None], 30, 0), "elastic_transform", 1).astype(float)
    inside = out[:, 12:20, 12:20]
    second = np.abs(np.diff(inside, 2, axis=1)).max(), np.abs(np.diff(inside, 2, axis=2)).max()
    assert max(second) <= 2, "straight but for rounding"
    moved = (out - plane)[:, 12:20, 12:20, :2].mean((1, 2)) / 4
    assert np.abs(moved).max() < 2.56 * 1.5
    assert moved.std() > 0.5
    assert abs(moved.mean()) < 0.6
    still = tools.sample(np.float32(plane[None]), rows[None] * 1.0, columns[None] * 1.0,
                         repeat=True)
    np.testing.assert_array_equal(still[0], plane)


@pytest.mark.parametrize(("repeat", "mode"), [(True, "reflect"), (False, "mirror")])
def test_samples_against_scipy(repeat, mode):
    random = np.random.default_rng(0)
    image = random.uniform(size=(7, 9)).astype(np.float32)
    rows, columns = random.uniform(-9, 15, (2, 5, 6))
    found = tools.sample(image[None, ..., None], rows[None], columns[None], repeat=repeat)
    expected = ndimage.map_coordinates(image, (rows, columns), order=1, mode=mode)
    np.testing.assert_allclose(found[0, ..., 0], expected, atol=1e-5)


def test_clouds():
    streams = tools.Streams([(0, i) for i in range(40)])
    smooth = tools.plasma(streams, 32, 3.0)
    rough = tools.plasma(streams, 32, 1.2)
    for clouds in (smooth, rough):
        assert clouds.min((1, 2)) == pytest.approx(np.zeros(40))
        assert clouds.max((1, 2)) == pytest.approx(np.ones(40))
    step = lambda x: np.abs(np.diff(x, axis=2)).mean()
    assert step(smooth) < 0.6 * step(rough)
    # A decay so fast that only the first scale counts: mean of the corners, once per point.
    first = tools.plasma(tools.Streams([(0, 3)]), 4, 1e6)[0]
    centre, across, along = first[2, 2], first[0, 2], first[2, 0]
    assert first[1, 1] == pytest.approx((first[0, 0] + centre + across + along) / 4, abs=1e-5)


def test_edges_and_equalised_greys():
    image = np.zeros((2, 16, 16), np.float32)
    image[0, 5:11, 5:11] = 200
    found = tools.edges(image, 50, 150)
    assert not found[1].any()
    assert found[0].sum() in range(16, 29), "one line around the square"
    assert not found[0, 7:9, 7:9].any()
    assert not found[0, :4].any()
    values = np.array([[[0, 0, 0, 10], [10, 200, 200, 201]]], np.float32)
    expected = [0, 0, 0, 102, 102, 204, 204, 255]  # (rank from the lowest - 3) / 5 * 255
    np.testing.assert_array_equal(tools.equalised(values).ravel(), expected)
    np.testing.assert_array_equal(tools.equalised(np.full((1, 2, 2), 7.0)), np.full((1, 2, 2), 7))


def test_layers_lie_where_they_should():
    dark = grey(60, 30)
    snow = corrupt(dark, "snow", 4)
    assert snow.min() >= 60
    frost = corrupt(dark, "frost", 1).astype(float)
    assert frost.min() >= 60
    assert frost.std((1, 2)).mean() > 3, "crystals, not a veil"
    assert frost[..., 2].mean() > frost[..., 0].mean(), "blue"
    water = corrupt(dark, "spatter", 2).astype(int) - 60
    assert water.min() >= 0
    wet = water[water.sum(-1) > 60]
    assert 0 < len(wet) < 0.3 * 30 * 1024
    np.testing.assert_allclose(wet[:, 0] / wet[:, 1], 175 / 238, atol=0.04)
    mud = corrupt(grey(255, 30), "spatter", 5)
    covered = mud[mud.min(-1) < 60]
    assert len(covered) > 100
    assert np.abs(covered - [63, 42, 20]).max() < 60
    assert (mud == 255).all(-1).mean() > 0.5


def test_wrong_images():
    for images, message in (
        (np.zeros((2, 28, 28, 1), np.uint8), r"uint8 of shape \(2, 28, 28, 1\): expected bytes"),
        (np.zeros((2, 32, 32, 3), np.float32), "corruption of float32"),
    ):
        with pytest.raises(ff.UsageError, match=message):
            corrupt(images, "fog", 1)
    with pytest.raises(ff.UsageError, match="severity 6: expected 1, 2, 3, 4 or 5"):
        corrupt(pictures(), "fog", 6)
    with pytest.raises(ff.UsageError, match=r"unknown corruption 'frog'.*Did you mean 'fog'"):
        corrupt(pictures(), "frog", 1)


def tiny(count=6, name="cifar10"):
    """A data set of CIFAR's shapes."""
    labels = (np.arange(count) % 10).astype(np.int32)
    examples = ff.data.Examples(pictures(count), labels)
    return ff.data.Dataset(name, examples, examples, 10, 255.0, (0.5,) * 3, (0.25,) * 3)


def write_published(folder, dataset, name="fog"):
    """NAME.npy and labels.npy as they are published; severity s has images of s."""
    folder.mkdir()
    count = len(dataset.test.labels)
    severity = np.repeat(np.arange(1, 6), count).astype(np.uint8)
    images = np.tile(severity[:, None, None, None], (1, 32, 32, 3))
    images[:, 0, 0, 0] = np.tile(np.arange(count), 5)
    np.save(folder / f"{name}.npy", images)
    np.save(folder / "labels.npy", np.tile(dataset.test.labels, 5).astype(np.uint8))
    return images


def test_published_arrays_are_read(tmp_path):
    dataset = tiny()
    write_published(tmp_path / "CIFAR-10-C", dataset)
    for severity in (1, 4):
        found = corrupted(dataset, "fog", severity, data_dir=tmp_path)
        assert (found.inputs[:, 5, 5] == severity).all()
        np.testing.assert_array_equal(found.inputs[:, 0, 0, 0], np.arange(6))
        np.testing.assert_array_equal(found.labels, dataset.test.labels)
    assert len(corrupted(dataset, "fog", 2, data_dir=tmp_path, limit=4).inputs) == 4
    assert [p.name for p in tmp_path.iterdir()] == ["CIFAR-10-C"], "nothing was made"


def test_wrong_published_arrays(tmp_path):
    dataset, folder = tiny(), tmp_path / "CIFAR-10-C"
    images = write_published(folder, dataset)
    read = lambda name="fog": corrupted(dataset, name, 1, data_dir=tmp_path)
    with pytest.raises(ff.UsageError, match=r"lacks snow\.npy: expected NAME\.npy of all 19"):
        read("snow")
    np.save(folder / "fog.npy", images[:-1])
    with pytest.raises(ff.UsageError, match=r"uint8 of shape \(29, 32, 32, 3\): expected.*\(30,"):
        read()
    np.save(folder / "fog.npy", images.astype(np.float32))
    with pytest.raises(ff.UsageError, match="holds float32"):
        read()
    np.save(folder / "fog.npy", images)
    (folder / "fog.npy").write_bytes((folder / "fog.npy").read_bytes()[:5000])
    with pytest.raises(ff.UsageError, match=r"fog\.npy is no whole \.npy file"):
        read()
    np.save(folder / "fog.npy", images)
    np.save(folder / "labels.npy", np.zeros(30, np.uint8))
    with pytest.raises(ff.UsageError, match="differs from the test labels of cifar10"):
        read()
    with pytest.raises(ff.UsageError, match="corruptions of digits: expected cifar10 or cifar100"):
        corrupted(tiny(name="digits"), "fog", 1)


def test_ours_are_made_kept_and_said(tmp_path, caplog, monkeypatch):
    dataset = tiny()
    monkeypatch.setattr(published, "_said", set())
    with caplog.at_level(logging.INFO, "fedjax_flat"):
        part = corrupted(dataset, "fog", 3, data_dir=tmp_path, limit=2)
        assert not list(tmp_path.iterdir()), "a part is not kept"
        made = corrupted(dataset, "fog", 3, data_dir=tmp_path)
    assert caplog.text.count("no CIFAR-10-C in the data folder: its images are ours") == 1
    np.testing.assert_array_equal(made.inputs, corrupt(dataset.test.inputs, "fog", 3))
    np.testing.assert_array_equal(part.inputs, made.inputs[:2])
    path = tmp_path / "CIFAR-10-C-ours" / "fog_3.npy"
    assert [p.name for p in path.parent.iterdir()] == ["fog_3.npy"]
    np.save(path, 255 - made.inputs)
    again = corrupted(dataset, "fog", 3, data_dir=tmp_path)
    np.testing.assert_array_equal(again.inputs, 255 - made.inputs, "read from there")
    np.save(path, made.inputs[:3])
    with pytest.raises(ff.UsageError, match="Delete it, and it is made again"):
        corrupted(dataset, "fog", 3, data_dir=tmp_path)
    corrupted(dataset, "fog", 1, cache=tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere" / "fog_1.npy").is_file()


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(file, array):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(ff.UsageError, match=r"cannot write .*fog_1\.npy \(No space left"):
        corrupted(tiny(), "fog", 1, data_dir=tmp_path)
    assert not list((tmp_path / "CIFAR-10-C-ours").iterdir())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs on a data set that calls itself cifar10."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        source = SOURCES["cifar10"]._replace(load=lambda data_dir, **settings: tiny(40))
        patch.setitem(SOURCES._table, "cifar10", source)
        for seed in (0, 1):
            config = small_config(seed=seed, rounds=1, data__name="cifar10", cohort__size=2,
                                  partition__name="iid", partition__clients=4)
            ff.train(config, folder / f"seed{seed}", progress=False)
        (folder / "digits").mkdir()
        (folder / "digits" / "config.json").write_text(to_json(small_config()))
        yield folder


@pytest.mark.slow
def test_robustness_of_runs(runs, capsys):
    two = [str(runs / "seed0"), str(runs / "seed1")]
    code = cli.main(["robustness", *two, "--severity", "3", "--corruption", "fog", "--corruption",
                     "contrast", "--examples", "30", "--data", str(runs / "data")])
    assert code == 0
    out = capsys.readouterr().out
    assert "accuracy (%), severity 3" in out
    (path,) = (runs / "seed0/robustness").glob("global_severity3_test30_*.json")
    stored = json.loads(path.read_text())
    assert path.with_suffix(".png").stat().st_size > 5000
    for run in two:
        trained = ff.load_run(run)
        found = stored["accuracy"][run.rpartition("/")[2]]
        built, dataset = trained.experiment, tiny(40)
        images = {"clean": dataset.test.inputs[:30], "fog": corrupt(dataset.test.inputs, "fog", 3),
                  "contrast": corrupt(dataset.test.inputs, "contrast", 3)}
        for name, seen in images.items():
            batch = ff.data.Batch(seen[:30], dataset.test.labels[:30], np.ones(30, bool))
            outputs = built.task.forward(trained.model(), built.task.prepare(batch, None), None)
            right = np.mean(np.asarray(outputs.logits).argmax(-1) == batch.labels)
            assert found[name] == pytest.approx(right, abs=1e-6)
            assert f"{100 * right:.2f}" in out
        assert found["mean"] == pytest.approx((found["fog"] + found["contrast"]) / 2)


def test_robustness_of_the_wrong_things(runs, capsys):
    good = str(runs / "seed0")
    for given, message in (
        (["--severity", "9"], "--severity 9: expected 1, 2, 3, 4 or 5"),
        (["--examples", "-1"], "--examples = -1"),
        (["--corruption", "frog"], "unknown corruption 'frog'"),
        (["--model", "swa"], "unknown model of"),
        ([str(runs / "digits")], "digits was trained on digits: corruptions of digits: expected"),
    ):
        assert cli.main(["robustness", good, *given]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(ff.UsageError, match="nowhere"):
        robustness([str(runs / "nowhere")])
