"""Images and the labels of their pixels, moved together: scale, crop, flip. One key per example.

FedDrive's augmentation (Fani's thesis, section 4.2): a scale s ~ U(low, high), a crop of fixed size
anywhere in the scaled image, a flip left to right half of the time.

    pixel (i, j) of the result <- (i + top, j + left) of the image of round(s H) x round(s W) pixels

Images are resized as `geometry.resize` does (triangle filter with antialiasing), labels by the
nearest pixel, both in one step: no scaled image is made, so that shapes do not depend on s. Where
the scaled image is smaller than the crop, it stands anywhere inside it, with black and `ignored`
around it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_flat import errors, rng
from fedjax_flat.data import geometry
from fedjax_flat.data.sources import Dataset


class Moves(NamedTuple):
    """`scale` is (low, high), or () for 1; `crop` (height, width), or () for the image's own."""

    scale: tuple[float, ...] = ()
    crop: tuple[int, ...] = ()
    flip: bool = False
    ignored: int = 255

    def __bool__(self) -> bool:
        return bool(self.scale or self.crop or self.flip)


def check(dataset: Dataset, moves: Moves) -> None:
    """Refuses ranges that are none, labels that are not of pixels, and crops larger than images."""
    scale, crop = moves.scale, moves.crop
    if scale and (len(scale) != 2 or not 0 < scale[0] <= scale[1]):
        raise errors.UsageError(f"scale = {scale}: expected (low, high), e.g. (0.5, 1.5).")
    if crop and (len(crop) != 2 or min(crop) < 1):
        raise errors.UsageError(f"crop = {crop}: expected (height, width), e.g. (512, 1024).")
    if not (scale or crop):
        return
    images, labels = dataset.input_shape, np.shape(dataset.train.labels)[1:]
    if dataset.task != "segmentation" or images[:2] != labels:
        raise errors.UsageError(
            f"scale and crop of {dataset.name}, with images of shape {images} and labels of shape "
            f"{labels}: expected segmentation, a label for every pixel."
        )
    largest = scale[-1] if scale else 1.0
    if crop and any(c > round(largest * n) for c, n in zip(crop, images[:2], strict=True)):
        raise errors.UsageError(
            f"crop = {crop} is larger than any image of {images[0]}x{images[1]} at scale "
            f"{largest:g}: expected at most {round(largest * images[0])}x"
            f"{round(largest * images[1])}."
        )


def move(
    key: jax.Array, image: jax.Array, labels: jax.Array, moves: Moves
) -> tuple[jax.Array, jax.Array]:
    """(image, labels) scaled, cropped and flipped as `moves` says."""
    if moves.scale or moves.crop:
        factor = jnp.float32(1)
        if moves.scale:
            factor = jax.random.uniform(rng.fold(key, "scale"), (), jnp.float32, *moves.scale)
        size = moves.crop or image.shape[:2]
        image, labels = _crop(rng.fold(key, "crop"), image, labels, factor, size, moves.ignored)
    if moves.flip:
        flipped = jax.random.bernoulli(rng.fold(key, "flip"))
        image = jnp.where(flipped, image[:, ::-1], image)
        labels = jnp.where(flipped, labels[:, ::-1], labels)
    return image, labels


def _crop(key, image, labels, factor, size, ignored):
    axes = []
    for i, (length, side) in enumerate(zip(image.shape[:2], size, strict=True)):
        scaled = jnp.maximum(jnp.round(factor * length).astype(jnp.int32), 1)
        room = scaled - side
        draw = jax.random.randint(
            jax.random.fold_in(key, i), (), jnp.minimum(room, 0), jnp.maximum(room, 0) + 1
        )
        axes.append(geometry.scaled_axis(length, scaled, draw, side))
    rows, columns = axes
    exact = jax.lax.Precision.HIGHEST
    narrow = jnp.einsum("ih,hwc->iwc", rows.weights, image.astype(jnp.float32), precision=exact)
    seen = jnp.einsum("jw,iwc->ijc", columns.weights, narrow, precision=exact)
    inside = rows.inside[:, None] & columns.inside[None, :]
    nearest = labels[rows.nearest][:, columns.nearest]
    nothing = jnp.asarray(ignored, labels.dtype)
    return geometry.stored_as(seen, image), jnp.where(inside, nearest, nothing)
