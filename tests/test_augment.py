"""Crop, flip, normalisation, cutout and mixup."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Problem, assert_same_bits

import fedjax_flat as ff
from fedjax_flat.data.augment import mix, random_crop, random_cutout, random_flip
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
