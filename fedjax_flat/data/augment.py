"""From stored examples to network inputs: crop, flip, normalise, cutout, mixup. Pure.

Crop, flip and cutout take one key per example, mixup one per batch. Cropping pads with black before
normalisation and cutout fills with zero after it, as the papers' torchvision pipelines do.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat import errors, rng
from fedjax_flat.data.federated import Batch
from fedjax_flat.data.sources import Dataset


class Preprocess(NamedTuple):
    """`train(batch, key)` augments and normalises, `evaluate(batch)` only normalises.

    `apply(batch, key)` is the one with a key and the other with None.
    """

    train: Callable[[Batch, jax.Array], Batch]
    evaluate: Callable[[Batch], Batch]
    mixes_labels: bool = False  # whether `train` makes each label a distribution over the classes
    moves_pixels: bool = False  # whether `train` crops or flips

    def apply(self, batch: Batch, key: jax.Array | None) -> Batch:
        """From stored examples to network inputs."""
        return self.evaluate(batch) if key is None else self.train(batch, key)


def preprocess(
    dataset: Dataset,
    *,
    crop_padding: int = 0,
    flip: bool = False,
    cutout: int = 0,
    mixup: float = 0.0,
) -> Preprocess:
    """The papers' pipeline for `dataset`: `cutout` in pixels, `mixup` the alpha of Beta."""
    changes = {"crop_padding": crop_padding, "flip": flip, "cutout": cutout}
    shape = dataset.input_shape
    is_image = isinstance(shape, tuple) and len(shape) == 3
    if not is_image and any(changes.values()):
        asked = ", ".join(name for name, value in changes.items() if value)
        raise errors.UsageError(
            f"{asked} of inputs of shape {shape}: expected images, (height, width, channels)."
        )
    height, width = shape[:2] if is_image else (0, 0)
    if not 0 <= cutout <= min(height, width):
        raise errors.UsageError(
            f"cutout of {cutout} pixels in images of {height}x{width}: expected 0 (none) to "
            f"{min(height, width)}."
        )
    if mixup < 0:
        raise errors.UsageError(f"mixup = {mixup}: expected 0 (none) or more.")

    def normalise(images):
        if not dataset.mean:
            return images
        mean = jnp.asarray(dataset.mean, jnp.float32).reshape((1,) * (images.ndim - 1) + (-1,))
        std = jnp.asarray(dataset.std, jnp.float32).reshape((1,) * (images.ndim - 1) + (-1,))
        return (images.astype(jnp.float32) / dataset.max_value - mean) / std

    def augment_one(key, image):
        if crop_padding:
            image = random_crop(rng.fold(key, "crop"), image, crop_padding)
        if flip:
            image = random_flip(rng.fold(key, "flip"), image)
        return image

    def train(batch, key):
        images = batch.inputs
        keys = rng.fold_each(key, batch.mask.shape[0])
        if crop_padding or flip:
            images = jax.vmap(augment_one)(keys, images)
        images = normalise(images)
        if cutout:
            cut = lambda k, image: random_cutout(rng.fold(k, "cutout"), image, cutout)
            images = jax.vmap(cut)(keys, images)
        batch = batch._replace(inputs=images)
        if mixup:
            batch = mix(rng.fold(key, "mixup"), batch, mixup, dataset.num_classes)
        return batch

    def evaluate(batch):
        return batch._replace(inputs=normalise(batch.inputs))

    return Preprocess(train, evaluate, mixup > 0, bool(crop_padding or flip))


def random_crop(key: jax.Array, image: jax.Array, padding: int) -> jax.Array:
    """A window of the image's own size, anywhere in the image padded by `padding` zeros."""
    corner = jax.random.randint(key, (2,), 0, 2 * padding + 1)
    padded = jnp.pad(image, ((padding, padding), (padding, padding), (0, 0)))
    return jax.lax.dynamic_slice(padded, (corner[0], corner[1], jnp.int32(0)), image.shape)


def random_flip(key: jax.Array, image: jax.Array) -> jax.Array:
    """Mirrored left to right with probability 1/2."""
    return jnp.where(jax.random.bernoulli(key), image[:, ::-1], image)


def random_cutout(key: jax.Array, image: jax.Array, side: int) -> jax.Array:
    """Zero in a square around a pixel of the image, cut off where it leaves the image.

    DeVries and Taylor, "Improved regularization of convolutional neural networks with cutout"
    (2017).
    """
    height, width, _ = image.shape
    y, x = jax.random.randint(key, (2,), 0, jnp.array([height, width]))
    inside = lambda centre, n: (jnp.arange(n) >= centre - side // 2) & (
        jnp.arange(n) < centre - side // 2 + side
    )
    hole = inside(y, height)[:, None] & inside(x, width)[None, :]
    return jnp.where(hole[:, :, None], jnp.zeros((), image.dtype), image)


def mix(key: jax.Array, batch: Batch, alpha: float, num_classes: int) -> Batch:
    """Mixup: each example and its label joined with another's, one lambda ~ Beta(alpha, alpha).

    Zhang et al., "mixup: beyond empirical risk minimization" (ICLR 2018). Partners are a random
    permutation of the batch's real examples, so that padding mixes into nothing.
    """
    weight = jax.random.beta(rng.fold(key, "lambda"), alpha, alpha)
    draws = jax.random.uniform(rng.fold(key, "partner"), batch.mask.shape)
    order = jnp.argsort(jnp.where(batch.mask, draws, 2.0))  # real examples first, shuffled
    partner = order[jnp.maximum(jnp.cumsum(batch.mask) - 1, 0)]
    labels = jax.nn.one_hot(batch.labels, num_classes, dtype=jnp.float32)
    blend = lambda a: weight * a + (1 - weight) * a[partner]
    return batch._replace(inputs=blend(batch.inputs), labels=blend(labels))
