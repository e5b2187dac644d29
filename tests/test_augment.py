"""Crop, resized crop, rotation, flip, normalisation, cutout and mixup."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Problem, assert_same_bits, small_config
from PIL import Image

import fedjax_flat as ff
from fedjax_flat.config_files import load_config
from fedjax_flat.data import geometry
from fedjax_flat.data.augment import (
    mix,
    random_crop,
    random_cutout,
    random_flip,
    random_resized_crop,
    random_rotation,
)
from fedjax_flat.experiment.assembly import build_network, build_task
from fedjax_flat.testing import blobs


def whole_batch(images, labels=None, mask=None):
    n = len(images)
    labels = np.zeros(n, np.int32) if labels is None else labels
    mask = np.ones(n, bool) if mask is None else mask
    return ff.data.Batch(*map(jnp.asarray, (images, labels, mask)))


def test_normalisation():
    data = blobs(3)
    out = ff.data.preprocess(data).evaluate(whole_batch(data.train.inputs)).inputs
    expected = (data.train.inputs.astype(np.float64) / 255 - 0.5) / 0.25
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)
    out = ff.data.preprocess(data, std=(0.2,)).evaluate(whole_batch(data.train.inputs)).inputs
    np.testing.assert_allclose(out, expected * 1.25, rtol=1e-6, atol=1e-6)


def test_normalisation_that_a_config_says():
    config = load_config(None, ["--config.data.mean=(0.25,)", "--config.data.std=(0.5,)"], None)
    digits = ff.data.load("digits")
    task = build_task(config, digits, build_network(config, digits))
    black = task.prepare(whole_batch(np.zeros((2, 8, 8, 1), np.uint8)), None)
    np.testing.assert_allclose(black.inputs, np.full((2, 8, 8, 1), -0.5), rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"std": (0.2, 0.2)}, r"std = \(0.2, 0.2\): expected 1 numbers, one per channel of blobs"),
        ({"mean": ("a",)}, "expected 1 numbers"),
        ({"std": (0.0,)}, "above 0"),
    ],
)
def test_normalisation_that_cannot_be(options, message):
    with pytest.raises(ff.UsageError, match=message):
        ff.data.preprocess(blobs(3), **options)
    plain = ff.data.from_arrays(np.zeros((2, 3), np.float32), np.array([0, 1]), name="rows")
    with pytest.raises(ff.UsageError, match="rows enters a network as it is"):
        ff.data.preprocess(plain, **options)


def test_crop_is_a_window_of_the_padded_image():
    image = np.arange(1, 31, dtype=np.uint8).reshape(5, 6, 1)
    padded = np.pad(image, ((2, 2), (2, 2), (0, 0)))
    windows = {
        padded[i : i + 5, j : j + 6].tobytes(): (i, j) for i in range(5) for j in range(5)
    }
    crop = jax.jit(jax.vmap(lambda key: random_crop(key, jnp.asarray(image), 2)))
    crops = crop(jax.random.split(jax.random.key(0), 500))
    seen = [windows[np.asarray(x).tobytes()] for x in crops]
    assert len(set(seen)) == 25, "every offset occurs, and only whole windows do"


def test_flip_mirrors_half_of_the_images():
    image = jnp.arange(12, dtype=jnp.uint8).reshape(2, 6, 1)
    flip = jax.jit(jax.vmap(lambda key: random_flip(key, image)))
    out = np.asarray(flip(jax.random.split(jax.random.key(0), 1000)))
    flipped = (out == np.asarray(image)[:, ::-1]).all((1, 2, 3))
    assert (flipped | (out == np.asarray(image)).all((1, 2, 3))).all()
    assert abs(flipped.mean() - 0.5) < 0.06


def turned(image, angle):
    """Each pixel of the result: where it comes from, and the four pixels around that point."""
    height, width, _ = image.shape
    out = np.zeros(image.shape)
    for i in range(height):
        for j in range(width):
            y, x = i - (height - 1) / 2, j - (width - 1) / 2
            y, x = (np.cos(angle) * y + np.sin(angle) * x + (height - 1) / 2,
                    np.cos(angle) * x - np.sin(angle) * y + (width - 1) / 2)
            for row in (int(np.floor(y)), int(np.floor(y)) + 1):
                for column in (int(np.floor(x)), int(np.floor(x)) + 1):
                    if 0 <= row < height and 0 <= column < width:
                        out[i, j] += (1 - abs(y - row)) * (1 - abs(x - column)) * image[row, column]
    return out


@pytest.mark.parametrize("shape", [(7, 7, 3), (6, 9, 1)])
def test_rotation_is_bilinear_and_black_outside(shape):
    image = np.random.default_rng(0).uniform(0, 255, shape).astype(np.float32)
    rotate = jax.jit(lambda a: geometry.rotate(jnp.asarray(image), jnp.cos(a), jnp.sin(a)))
    for angle in (0.3, -0.4, 1.9, 3.0):
        np.testing.assert_allclose(rotate(angle), turned(image, angle), atol=2e-3)
    assert (turned(image, 0.6)[0, 0] == 0).all()


def test_random_rotation():
    image = jnp.zeros((33, 33, 1)).at[16, 31].set(1.0)
    turn = jax.jit(jax.vmap(lambda key: random_rotation(key, image, 0.06)))
    out = np.asarray(turn(jax.random.split(jax.random.key(0), 400)))[..., 0]
    rows, columns = np.mgrid[:33, :33] - 16.0
    weight = lambda x: (out * x).sum((1, 2)) / out.sum((1, 2))
    angle = np.arctan2(-weight(rows), weight(columns)) / (2 * np.pi)
    assert np.abs(angle).max() <= 0.062
    assert np.abs(angle).max() > 0.055
    assert abs(angle.mean()) < 0.006
    assert abs(angle.std() - 0.12 / np.sqrt(12)) < 0.004, "uniform"


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_a_rotation_by_nothing_is_no_rotation(dtype):
    image = jnp.asarray(np.random.default_rng(0).uniform(0, 255, (8, 5, 2)).astype(dtype))
    still = geometry.rotate(image, jnp.float32(1), jnp.float32(0))
    assert_same_bits(still, image)
    assert_same_bits(random_rotation(jax.random.key(0), image, 0.0), image)


def resized(image, box, side):
    """The triangle filter with antialiasing, from its definition."""
    def weights(start, count):
        rows = np.zeros((side, image.shape[0] + image.shape[1]))
        for i in range(side):
            centre, reach = start + (i + 0.5) * count / side, max(1.0, count / side)
            for k in range(start, start + count):
                rows[i, k] = max(0.0, 1 - abs(k + 0.5 - centre) / reach)
        return rows / rows.sum(1, keepdims=True)

    top, left, height, width = box
    rows = weights(top, height)[:, : image.shape[0]]
    columns = weights(left, width)[:, : image.shape[1]]
    return np.einsum("ih,jw,hwc->ijc", rows, columns, image.astype(np.float64))


BOXES = [(0, 0, 12, 17), (2, 3, 7, 5), (5, 0, 1, 9), (11, 16, 1, 1), (0, 4, 12, 3)]


@pytest.mark.parametrize("side", [4, 8, 20])
def test_resize_is_the_triangle_filter_and_pillows(side):
    image = np.random.default_rng(0).integers(0, 256, (12, 17, 3)).astype(np.uint8)
    resize = jax.jit(lambda image, box: geometry.resize(image, box, side))
    for box in BOXES:
        args = geometry.Box(*map(jnp.int32, box))
        exact = resize(jnp.asarray(image, jnp.float32), args)
        np.testing.assert_allclose(exact, resized(image, box, side), atol=1e-3)
        top, left, height, width = box
        part = Image.fromarray(image[top : top + height, left : left + width])
        pillow = np.asarray(part.resize((side, side), Image.Resampling.BILINEAR), int)
        ours = np.asarray(resize(jnp.asarray(image), args))
        assert ours.dtype == np.uint8
        assert np.abs(ours - pillow).max() <= 1, "Pillow rounds after each axis"


def test_a_crop_of_everything_is_a_plain_resize():
    image = jnp.asarray(np.random.default_rng(0).integers(0, 256, (9, 9, 3)).astype(np.uint8))
    key = jax.random.key(3)
    crop = jax.jit(
        lambda side: random_resized_crop(key, image, side, (1, 1), (1, 1)), static_argnums=0
    )
    np.testing.assert_array_equal(
        crop(5), geometry.resize(image, geometry.central_square(9, 9), 5)
    )
    assert_same_bits(crop(9), image)


def test_boxes_have_the_asked_areas_aspects_and_places():
    keys = jax.random.split(jax.random.key(0), 4000)
    draw = jax.jit(jax.vmap(lambda key: geometry.random_box(key, 200, 300)))
    top, left, height, width = map(np.asarray, draw(keys))
    assert ((top >= 0) & (left >= 0) & (top + height <= 200) & (left + width <= 300)).all()
    share, aspect = height * width / 60000, width / height
    assert share.min() > 0.078
    assert 0.87 < share.max() < 0.9, "200 x 267: no wider one is allowed"
    assert 0.74 < aspect.min() < 0.76
    assert 1.32 < aspect.max() < 1.35
    small = share < 0.4  # all of these fit, whatever their aspect
    counts, _ = np.histogram(share[small], 4, (0.08, 0.4))
    assert counts.min() > 0.85 * counts.mean(), "areas are uniform"
    logs, _ = np.histogram(np.log(aspect[small]), 4, (np.log(3 / 4), np.log(4 / 3)))
    assert logs.min() > 0.85 * logs.mean(), "aspects are log-uniform"
    place = (top[small] + 0.5) / (200 - height[small] + 1)
    assert abs(place.mean() - 0.5) < 0.03
    assert place.std() == pytest.approx(1 / np.sqrt(12), rel=0.05)


def test_a_box_that_never_fits_is_the_largest_central_one():
    box = geometry.random_box(jax.random.key(0), 10, 100, scale=(1, 1))
    assert [int(x) for x in box] == [0, 43, 10, 13], "aspect 4/3 of height 10"


@pytest.mark.slow
def test_a_resized_crop_changes_what_the_network_reads():
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (6, 10, 14, 3)).astype(np.uint8)
    data = ff.data.from_arrays(images, np.arange(6) % 3)
    preprocess = ff.data.preprocess(data, resized_crop=8, flip=True)
    assert preprocess.inputs == jax.ShapeDtypeStruct((1, 8, 8, 3), jnp.float32)
    assert ff.data.preprocess(data).inputs == data.inputs
    trained = jax.jit(preprocess.train)(whole_batch(images), jax.random.key(0))
    assert trained.inputs.shape == (6, 8, 8, 3)
    seen = preprocess.evaluate(whole_batch(images)).inputs
    middle = np.stack([resized(x, (0, 2, 10, 10), 8) for x in images])
    expected = (middle / 255 - np.array(data.mean)) / np.array(data.std)
    np.testing.assert_allclose(seen, expected, atol=0.51 / 255 / min(data.std))
    built = ff.build(small_config(data__resized_crop=6, data__rotation=0.06))
    state = built.init()
    shapes = [x.shape for x in jax.tree.leaves(state.server)]
    assert (36, 64) in shapes, "the first layer of the MLP reads 6 x 6 pixels"
    sums = built.evaluate(built.models(state)["global"], built.split("test"))
    assert int(sums["units"]) == 355


def test_rotated_training_differs_by_example_and_evaluation_does_not_turn():
    data = blobs(8)
    preprocess = ff.data.preprocess(data, rotation=0.2)
    images = np.repeat(data.train.inputs[:1], 8, axis=0)
    out = np.asarray(jax.jit(preprocess.train)(whole_batch(images), jax.random.key(0)).inputs)
    assert len({x.tobytes() for x in out}) == 8
    plain = ff.data.preprocess(data).evaluate(whole_batch(images)).inputs
    assert_same_bits(preprocess.evaluate(whole_batch(images)).inputs, plain)


def test_wrong_crops_and_turns():
    data = blobs(3)
    for given, message in (
        ({"crop_padding": 1, "resized_crop": 4}, "crop_padding = 1 and resized_crop = 4: expected"),
        ({"resized_crop": -1}, "resized_crop = -1: expected 0 or more"),
        ({"rotation": 0.6}, "rotation = 0.6: expected 0"),
        ({"resized_crop": 2, "cutout": 3}, "cutout of 3 pixels in images of 2x2"),
    ):
        with pytest.raises(ff.UsageError, match=message):
            ff.data.preprocess(data, **given)
    with pytest.raises(ff.UsageError, match="crop_padding = 2 and resized_crop = 8"):
        ff.validate(small_config(data__crop_padding=2, data__resized_crop=8))
    with pytest.raises(ff.UsageError, match="fedsgd sees the examples as they are"):
        ff.validate(small_config(algorithm__name="fedsgd", data__rotation=0.1))
    ff.validate(small_config(algorithm__name="fedsgd", data__resized_crop=6))
    rows = ff.data.from_arrays(np.zeros((4, 3), np.float32), np.zeros(4, np.int32))
    with pytest.raises(ff.UsageError, match=r"resized_crop, rotation of inputs of shape \(3,\)"):
        ff.data.preprocess(rows, resized_crop=2, rotation=0.1)


def test_each_example_has_its_own_key_and_ignores_the_others():
    data = blobs(8)
    train = ff.data.preprocess(data, crop_padding=2, flip=True).train
    images = np.repeat(data.train.inputs[:1], 8, axis=0)
    out = np.asarray(train(whole_batch(images), jax.random.key(0)).inputs)
    assert len({x.tobytes() for x in out}) > 3
    few = train(whole_batch(images[:3]), jax.random.key(0)).inputs
    np.testing.assert_array_equal(out[:3], few)


@pytest.mark.parametrize("side", [1, 4, 5])
def test_cutout_is_one_square_cut_off_at_the_border(side):
    image = jnp.ones((6, 5, 2))
    cut = jax.jit(jax.vmap(lambda key: random_cutout(key, image, side)))
    holes = np.asarray(cut(jax.random.split(jax.random.key(0), 600))) == 0
    assert (holes[..., 0] == holes[..., 1]).all(), "the same pixels in every channel"
    expected = set()
    for y in range(6):
        for x in range(5):
            hole = np.zeros((6, 5), bool)
            top, left = y - side // 2, x - side // 2
            hole[max(top, 0) : top + side, max(left, 0) : left + side] = True
            expected.add(hole.tobytes())
    assert {h.tobytes() for h in holes[..., 0]} == expected, "every centre occurs"


def test_cutout_acts_on_normalised_images_when_training_only():
    data = blobs(4)
    preprocess = ff.data.preprocess(data, cutout=2)
    batch = whole_batch(data.train.inputs)
    plain = preprocess.evaluate(batch).inputs
    cut = np.asarray(preprocess.train(batch, jax.random.key(0)).inputs)
    assert (plain != 0).all()
    changed = cut != np.asarray(plain)
    assert (cut[changed] == 0).all()
    assert (changed.sum((1, 2, 3)) >= 1).all()
    assert (changed.sum((1, 2, 3)) <= 4).all()


@pytest.mark.parametrize("real", [1, 2, 6])
def test_mixup_joins_real_examples_with_one_lambda(real):
    rng = np.random.default_rng(0)
    images = rng.normal(size=(6, 2, 2, 1)).astype(np.float32)
    images[real:] = np.nan  # padding
    labels = np.arange(6, dtype=np.int32)
    batch = whole_batch(images, labels, np.arange(6) < real)
    seen = set()
    for seed in range(6):
        out = mix(jax.random.key(seed), batch, 1.0, 6)
        mixed = np.asarray(out.labels)[:real]
        np.testing.assert_allclose(mixed.sum(1), 1, rtol=1e-6)
        own = mixed[np.arange(real), labels[:real]]
        partner = np.where(own > 1 - 1e-6, labels[:real],
                           (mixed - np.eye(6)[:real] * own[:, None]).argmax(1))
        assert sorted(partner) == list(range(real)), "partners are a permutation"
        moved = partner != labels[:real]
        np.testing.assert_allclose(own[moved], own[moved][:1].repeat(moved.sum()), rtol=1e-5)
        blend = own[:, None, None, None]
        expected = blend * images[:real] + (1 - blend) * images[partner]
        np.testing.assert_allclose(out.inputs[:real], expected, rtol=1e-5, atol=1e-6)
        seen.update(np.round(own[moved], 6).tolist())
    assert len(seen) > 1 or real == 1, "lambda is drawn anew for every batch"


@pytest.mark.slow
def test_mixup_is_the_same_in_both_passes():
    """With rho = 0 the second pass repeats the first one: FedAvg with mixup, bit for bit."""
    problem = Problem((7, 4, 9))
    preprocess = ff.data.preprocess(problem.dataset, mixup=1.0)
    problem.task = ff.tasks.classification(problem.model, preprocess)
    plain, info = problem.run(problem.fedavg(), 2)
    sharp, _ = problem.run(problem.fedavg(sharpness=ff.client.sam(0.0)), 2)
    assert_same_bits(plain, sharp)
    assert np.isfinite(info.report["loss"])


def test_cross_entropy_of_a_mixture_is_the_mixture_of_cross_entropies():
    logits = jnp.array([[1.0, -2.0, 0.5]])
    ce = ff.tasks.cross_entropy
    parts = [float(ce(logits, jnp.array([k]))[0]) for k in (0, 2)]
    mixed = float(ce(logits, jnp.array([[0.3, 0.0, 0.7]]))[0])
    assert mixed == pytest.approx(0.3 * parts[0] + 0.7 * parts[1], rel=1e-6)


def test_mixup_needs_a_loss_of_distributions():
    problem = Problem((4,))
    mixing = ff.data.preprocess(problem.dataset, mixup=1.0)
    integers = optax.softmax_cross_entropy_with_integer_labels
    with pytest.raises(ff.UsageError, match=r"softmax_cross_entropy_with_integer_labels.*classes"):
        ff.tasks.classification(problem.model, mixing, loss=integers)
    plain = ff.data.preprocess(problem.dataset)
    assert ff.tasks.classification(problem.model, plain, loss=integers)
