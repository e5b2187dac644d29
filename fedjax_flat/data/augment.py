"""From stored examples to network inputs: colours, crops, turns, normalise, cutout, mixup. Pure.

All but mixup, which has one per batch, take one key per example. Crops and rotations are of stored
images, black beyond the border, and keep their type; cutout fills with zero after normalisation, as
the papers' torchvision pipelines do. In order: style, colours, resized crop, rotation, padded crop,
flip.
Where labels are of pixels, only what moves them with the images (data/scenes.py) moves pixels.

A resized crop makes images of another size: `Preprocess.inputs` says what the network reads.
Evaluation then takes the largest central square, resized to the same side (the short side resized,
then a central crop; nothing is cut off of a square image).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat import errors, rng
from fedjax_flat.data import geometry, scenes, styles
from fedjax_flat.data.federated import Batch
from fedjax_flat.data.rdn import Normals
from fedjax_flat.data.sources import Dataset


class Preprocess(NamedTuple):
    """`train(batch, key)` augments and normalises, `evaluate(batch)` resizes and normalises only.

    `apply(batch, key)` is the one with a key and the other with None. `inputs` is the shape and
    type of a batch of one example, as a network reads it.
    """

    train: Callable[[Batch, jax.Array], Batch]
    evaluate: Callable[[Batch], Batch]
    mixes_labels: bool = False  # whether `train` makes each label a distribution over the classes
    moves_pixels: bool = False  # whether `train` crops, turns or flips
    moves_labels: bool = False  # whether labels of pixels are moved with them
    inputs: Any = None

    def apply(self, batch: Batch, key: jax.Array | None) -> Batch:
        """From stored examples to network inputs."""
        return self.evaluate(batch) if key is None else self.train(batch, key)


def preprocess(
    dataset: Dataset,
    *,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    crop_padding: int = 0,
    resized_crop: int = 0,
    rotation: float = 0.0,
    flip: bool = False,
    cutout: int = 0,
    mixup: float = 0.0,
    jitter: Sequence[float] = (),
    scale: Sequence[float] = (),
    crop: Sequence[int] = (),
    ignored: int = 255,
    normals: Normals | None = None,
    style: styles.Style | None = None,
) -> Preprocess:
    """The papers' pipeline for `dataset`.

    `mean` and `std` of the channels replace the data set's own; with `normals`, images are
    normalised by clients' statistics instead (data/rdn.py). `resized_crop` and `cutout` are
    sides in pixels, `rotation` the largest turn to either side, of 1 (0.06 is 21.6 degrees),
    `mixup` the alpha of Beta, `jitter` the largest changes of brightness, contrast and saturation.
    Where labels are of pixels, `scale` and `crop` (data/scenes.py) and `flip` move both, and what
    is beyond an image is labelled `ignored`. With a `style`, images are first restyled by those of
    other clients (data/styles.py).
    """
    check_crops(crop_padding, resized_crop)
    mean, std = _statistics(dataset, mean, std)
    height, width = _image_size(dataset, {
        "crop_padding": crop_padding, "resized_crop": resized_crop, "rotation": rotation,
        "flip": flip, "cutout": cutout, "jitter": jitter, "scale": scale, "crop": crop,
    })
    _check_jitter(dataset, jitter)
    dense = dataset.task == "segmentation"
    together = scenes.Moves(tuple(scale), tuple(crop), flip and dense, ignored)
    scenes.check(dataset, together)
    inputs = dataset.inputs
    if resized_crop:
        height = width = resized_crop
        inputs = jax.ShapeDtypeStruct((1, height, width, inputs.shape[-1]), inputs.dtype)
    if not 0 <= cutout <= min(height, width):
        raise errors.UsageError(
            f"cutout of {cutout} pixels in images of {height}x{width}: expected 0 (none) to "
            f"{min(height, width)}."
        )
    if mixup < 0:
        raise errors.UsageError(f"mixup = {mixup}: expected 0 (none) or more.")
    if not 0 <= rotation <= 0.5:
        raise errors.UsageError(f"rotation = {rotation}: expected 0 (none) to 0.5, half a turn.")
    alone = bool(crop_padding or resized_crop or rotation or (flip and not dense))
    moves = alone or bool(together)

    def normalise(images, group=None):
        if normals:
            return normals.normalise(images, group)
        if not mean:
            return images
        channels = (1,) * (images.ndim - 1) + (-1,)
        centre, scale = (jnp.asarray(x, jnp.float32).reshape(channels) for x in (mean, std))
        return (images.astype(jnp.float32) / dataset.max_value - centre) / scale

    def augment_one(key, image):
        if jitter:
            largest = dataset.max_value
            image = random_colours(rng.fold(key, "colours"), image, jitter, largest)
        if resized_crop:
            image = random_resized_crop(rng.fold(key, "resized crop"), image, resized_crop)
        if rotation:
            image = random_rotation(rng.fold(key, "rotation"), image, rotation)
        if crop_padding:
            image = random_crop(rng.fold(key, "crop"), image, crop_padding)
        if flip and not dense:
            image = random_flip(rng.fold(key, "flip"), image)
        return image

    def train(batch, key):
        images, count = batch.inputs, batch.mask.shape[0]
        keys, group = rng.fold_each(key, count), None
        if style:
            images = styles.apply(style, rng.fold(key, "style"), images)
        if normals:
            images, group = normals.images(images), normals.drawn(rng.fold(key, "rdn"), count)
        if alone or jitter:
            images = jax.vmap(augment_one)(keys, images)
        if together:
            one = lambda k, x, y: scenes.move(rng.fold(k, "scene"), x, y, together)
            images, labels = jax.vmap(one)(keys, images, batch.labels)
            batch = batch._replace(labels=labels)
        images = normalise(images, group)
        if cutout:
            cut = lambda k, image: random_cutout(rng.fold(k, "cutout"), image, cutout)
            images = jax.vmap(cut)(keys, images)
        batch = batch._replace(inputs=images)
        if mixup:
            batch = mix(rng.fold(key, "mixup"), batch, mixup, dataset.num_classes)
        return batch

    def evaluate(batch):
        images, group = styles.images_of(batch.inputs), None
        if normals:
            images, group = normals.images(images), normals.own(images)
        if resized_crop:
            whole = geometry.central_square(*images.shape[1:3])
            images = jax.vmap(lambda image: geometry.resize(image, whole, resized_crop))(images)
        return batch._replace(inputs=normalise(images, group))

    return Preprocess(train, evaluate, mixup > 0, moves, dense and not alone, inputs)


def check_crops(crop_padding: int, resized_crop: int) -> None:
    """Refuses both kinds of crop at once."""
    errors.at_least("resized_crop", resized_crop, 0)
    if crop_padding and resized_crop:
        raise errors.UsageError(
            f"crop_padding = {crop_padding} and resized_crop = {resized_crop}: expected one of "
            "them, because either is the random crop of an image. Set the other to 0."
        )


def _statistics(
    dataset: Dataset, mean: Sequence[float], std: Sequence[float]
) -> tuple[Sequence[float], Sequence[float]]:
    """(mean, std) of the channels: those given, else the data set's own."""
    for name, given, own in (("mean", mean, dataset.mean), ("std", std, dataset.std)):
        if given and not own:
            raise errors.UsageError(
                f"{name} = {tuple(given)}: {dataset.name} enters a network as it is. Leave it out."
            )
        numbers = all(isinstance(x, int | float) for x in given)
        if given and (len(given) != len(own) or not numbers):
            raise errors.UsageError(
                f"{name} = {tuple(given)}: expected {len(own)} numbers, one per channel of "
                f"{dataset.name}, e.g. {own}."
            )
    if std and min(std) <= 0:
        raise errors.UsageError(f"std = {tuple(std)}: expected numbers above 0.")
    return mean or dataset.mean, std or dataset.std


def _image_size(dataset: Dataset, changes: dict[str, Any]) -> tuple[int, int]:
    """(height, width); refuses changes of what is no image."""
    shape = dataset.input_shape
    if isinstance(shape, tuple) and len(shape) == 3:
        return shape[0], shape[1]
    if any(changes.values()):
        asked = ", ".join(name for name, value in changes.items() if value)
        raise errors.UsageError(
            f"{asked} of inputs of shape {shape}: expected images, (height, width, channels)."
        )
    return 0, 0


def _check_jitter(dataset: Dataset, jitter: Sequence[float]) -> None:
    if jitter and (len(jitter) != 3 or min(jitter) < 0):
        raise errors.UsageError(
            f"jitter = {tuple(jitter)}: expected three numbers of 0 or more, the largest changes "
            "of brightness, contrast and saturation, e.g. (0.5, 0.5, 0.5)."
        )
    if jitter and dataset.input_shape[-1] != 3:
        raise errors.UsageError(
            f"jitter of images of shape {dataset.input_shape} ({dataset.name}): expected three "
            "channels."
        )


def random_colours(
    key: jax.Array, image: jax.Array, amounts: Sequence[float], largest: float
) -> jax.Array:
    """Brightness, contrast and saturation times factors in 1 -+ amount, in this order.

    An image is blended with black, with the mean of its grey, and with its grey; whole numbers stay
    in 0 .. `largest`. torchvision's ColorJitter, but for its order, which is random.
    """
    grey = lambda x: jnp.sum(
        x * jnp.array([0.299, 0.587, 0.114], x.dtype).reshape(1, 1, 3), -1, keepdims=True
    )
    whole = not jnp.issubdtype(image.dtype, jnp.floating)
    seen = image.astype(jnp.float32)
    others = (jnp.zeros_like, lambda x: jnp.broadcast_to(jnp.mean(grey(x)), x.shape), grey)
    for i, (amount, other) in enumerate(zip(amounts, others, strict=True)):
        low = max(0.0, 1.0 - amount)
        factor = jax.random.uniform(jax.random.fold_in(key, i), (), jnp.float32, low, 1 + amount)
        seen = factor * seen + (1 - factor) * other(seen)
        seen = jnp.clip(seen, 0.0, largest) if whole else seen
    return geometry.stored_as(seen, image, largest)


def random_resized_crop(
    key: jax.Array,
    image: jax.Array,
    side: int,
    scale: tuple[float, float] = (0.08, 1.0),
    aspect: tuple[float, float] = (3 / 4, 4 / 3),
) -> jax.Array:
    """A box of the image at random (see `geometry.random_box`), as a square of `side` pixels."""
    box = geometry.random_box(key, *image.shape[:2], scale=scale, aspect=aspect)
    return geometry.resize(image, box, side)


def random_rotation(key: jax.Array, image: jax.Array, turns: float) -> jax.Array:
    """Turned about its centre by an angle between -`turns` and `turns`, black around it."""
    angle = 2 * math.pi * jax.random.uniform(key, (), jnp.float32, -turns, turns)
    return geometry.rotate(image, jnp.cos(angle), jnp.sin(angle))


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
