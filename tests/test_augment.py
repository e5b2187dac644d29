"""Crop, flip and normalisation."""

import jax
import jax.numpy as jnp
import numpy as np
from conftest import blobs

import fedjax_flat as ff
from fedjax_flat.data.augment import random_crop, random_flip


def test_normalisation():
    data = blobs(3)
    out = ff.data.preprocess(data).evaluate(jnp.asarray(data.train.images))
    expected = (data.train.images.astype(np.float64) / 255 - 0.5) / 0.25
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
    images = jnp.asarray(np.repeat(data.train.images[:1], 8, axis=0))
    out = np.asarray(train(images, jax.random.key(0)))
    assert len({x.tobytes() for x in out}) > 3
    np.testing.assert_array_equal(out[:3], train(images[:3], jax.random.key(0)))
