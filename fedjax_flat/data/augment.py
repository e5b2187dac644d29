"""From uint8 images to network inputs: crop, flip, normalise. Pure; one key per example.

Cropping pads with black before normalisation, as the papers' torchvision pipelines do.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat import rng
from fedjax_flat.data.sources import Dataset


class Preprocess(NamedTuple):
    """`train(images, key)` augments and normalises, `evaluate(images)` only normalises."""

    train: Callable[[jax.Array, jax.Array], jax.Array]
    evaluate: Callable[[jax.Array], jax.Array]


def preprocess(dataset: Dataset, *, crop_padding: int = 0, flip: bool = False) -> Preprocess:
    """The papers' pipeline for `dataset`."""

    def evaluate(images):
        mean = jnp.asarray(dataset.mean, jnp.float32).reshape(1, 1, 1, -1)
        std = jnp.asarray(dataset.std, jnp.float32).reshape(1, 1, 1, -1)
        return (images.astype(jnp.float32) / dataset.max_value - mean) / std

    def augment_one(key, image):
        if crop_padding:
            image = random_crop(rng.fold(key, "crop"), image, crop_padding)
        if flip:
            image = random_flip(rng.fold(key, "flip"), image)
        return image

    def train(images, key):
        if crop_padding or flip:
            images = jax.vmap(augment_one)(rng.fold_each(key, images.shape[0]), images)
        return evaluate(images)

    return Preprocess(train, evaluate)


def random_crop(key: jax.Array, image: jax.Array, padding: int) -> jax.Array:
    """A window of the image's own size, anywhere in the image padded by `padding` zeros."""
    corner = jax.random.randint(key, (2,), 0, 2 * padding + 1)
    padded = jnp.pad(image, ((padding, padding), (padding, padding), (0, 0)))
    return jax.lax.dynamic_slice(padded, (corner[0], corner[1], jnp.int32(0)), image.shape)


def random_flip(key: jax.Array, image: jax.Array) -> jax.Array:
    """Mirrored left to right with probability 1/2."""
    return jnp.where(jax.random.bernoulli(key), image[:, ::-1], image)
