"""Images turned, cropped and resized: bilinear, under jit, one image at a time.

Pixel (i, j) stands at the point (i, j); a turn is about the centre of the image. An image keeps its
type: whole numbers are rounded, as an image library does that stores bytes.

`resize` is the triangle filter with antialiasing, as Pillow's BILINEAR and torchvision's
RandomResizedCrop have it: a pixel of the result is a mean over the box's pixels, weighted by
max(0, 1 - |distance| / max(1, pixels of the box per pixel of the result)). Nothing outside the box
enters, which `jax.image.scale_and_translate` would let in at the border.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Box(NamedTuple):
    """A part of an image, in whole pixels."""

    top: jax.Array
    left: jax.Array
    height: jax.Array
    width: jax.Array


def stored_as(values: jax.Array, like: jax.Array, largest: float | None = None) -> jax.Array:
    """`values` in the type of `like`: whole numbers rounded, and clipped to 0 .. `largest`."""
    if not jnp.issubdtype(like.dtype, jnp.floating):
        values = jnp.round(values)
        values = values if largest is None else jnp.clip(values, 0.0, largest)
    return values.astype(like.dtype)


def rotate(image: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """The image turned counterclockwise by the angle of this cosine and sine; black around it.

    Between pixels it is bilinear, and beyond the border every pixel is black. Exact for multiples
    of 90 degrees of a square image, where every point of the result is a pixel of the image.
    """
    height, width, _ = image.shape
    y = (jnp.arange(height, dtype=jnp.float32) - (height - 1) / 2)[:, None]
    x = (jnp.arange(width, dtype=jnp.float32) - (width - 1) / 2)[None, :]
    from_y = cosine * y + sine * x + (height - 1) / 2
    from_x = cosine * x - sine * y + (width - 1) / 2
    padded = jnp.pad(image, ((1, 1), (1, 1), (0, 0))).astype(jnp.float32)
    top, left = jnp.floor(from_y), jnp.floor(from_x)
    down, right = (from_y - top)[..., None], (from_x - left)[..., None]

    def pixel(i, j):
        row = jnp.clip(i.astype(jnp.int32) + 1, 0, height + 1)
        column = jnp.clip(j.astype(jnp.int32) + 1, 0, width + 1)
        return padded[row, column]

    above = (1 - right) * pixel(top, left) + right * pixel(top, left + 1)
    below = (1 - right) * pixel(top + 1, left) + right * pixel(top + 1, left + 1)
    return stored_as((1 - down) * above + down * below, image)


def resize(image: jax.Array, box: Box, side: int) -> jax.Array:
    """The part of the image in `box` as a square of `side` pixels."""
    height, width, _ = image.shape
    rows = _weights(height, box.top, box.height, side)
    columns = _weights(width, box.left, box.width, side)
    exact = jax.lax.Precision.HIGHEST
    narrow = jnp.einsum("ih,hwc->iwc", rows, image.astype(jnp.float32), precision=exact)
    return stored_as(jnp.einsum("jw,iwc->ijc", columns, narrow, precision=exact), image)


def _weights(length: int, start: jax.Array, count: jax.Array, side: int) -> jax.Array:
    """(side, length): how much of each pixel of an axis is in each pixel of the result."""
    start, count = jnp.asarray(start, jnp.float32), jnp.asarray(count, jnp.float32)
    scale = count / side
    centre = start + (jnp.arange(side, dtype=jnp.float32) + 0.5) * scale - 0.5
    position = jnp.arange(length, dtype=jnp.float32)
    distance = jnp.abs(position[None, :] - centre[:, None])
    inside = (position >= start) & (position < start + count)
    weights = jnp.maximum(0.0, 1 - distance / jnp.maximum(1.0, scale))
    weights = jnp.where(inside[None, :], weights, 0.0)
    return weights / weights.sum(axis=1, keepdims=True)


class Axis(NamedTuple):
    """What a window along one axis of a scaled image reads of the image."""

    weights: jax.Array  # (pixels of the window, pixels of the image); rows of zeros outside
    nearest: jax.Array  # the pixel of the image that is nearest to each of the window
    inside: jax.Array  # whether a pixel of the window is in the scaled image


def scaled_axis(length: int, scaled: jax.Array, start: jax.Array, side: int) -> Axis:
    """Pixels start .. start + side - 1 of an axis of `length` pixels that became `scaled`."""
    ratio = length / scaled.astype(jnp.float32)
    place = start + jnp.arange(side)
    inside = (place >= 0) & (place < scaled)
    centre = (place.astype(jnp.float32) + 0.5) * ratio
    position = jnp.arange(length, dtype=jnp.float32)
    distance = jnp.abs(position[None, :] + 0.5 - centre[:, None])
    weights = jnp.maximum(0.0, 1 - distance / jnp.maximum(1.0, ratio))
    weights = jnp.where(inside[:, None], weights, 0.0)
    total = weights.sum(axis=1, keepdims=True)
    nearest = jnp.clip(jnp.floor(centre).astype(jnp.int32), 0, length - 1)
    return Axis(weights / jnp.where(total > 0, total, 1.0), nearest, inside)


def central_square(height: int, width: int) -> Box:
    """The largest square in the middle of an image."""
    side = min(height, width)
    box = ((height - side) // 2, (width - side) // 2, side, side)
    return Box(*(jnp.int32(x) for x in box))


def random_box(
    key: jax.Array,
    height: int,
    width: int,
    *,
    scale: tuple[float, float] = (0.08, 1.0),
    aspect: tuple[float, float] = (3 / 4, 4 / 3),
    tries: int = 10,
) -> Box:
    """A share of the image's area in `scale`, of width over height in `aspect`.

    The area is uniform, the aspect log-uniform, the place uniform among those inside the image. The
    first of `tries` draws that fits is taken; if none does, the largest central box whose aspect is
    the nearest allowed one. Szegedy et al., "Going deeper with convolutions" (CVPR 2015), with the
    draws of torchvision.
    """
    area_key, aspect_key, top_key, left_key = jax.random.split(key, 4)
    area = height * width * jax.random.uniform(area_key, (tries,), jnp.float32, *scale)
    low, high = jnp.log(jnp.array(aspect, jnp.float32))
    ratio = jnp.exp(jax.random.uniform(aspect_key, (tries,), jnp.float32, low, high))
    tall = jnp.round(jnp.sqrt(area / ratio)).astype(jnp.int32)
    wide = jnp.round(jnp.sqrt(area * ratio)).astype(jnp.int32)
    fits = (tall >= 1) & (tall <= height) & (wide >= 1) & (wide <= width)
    first = jnp.argmax(fits)
    nearest = min(max(width / height, aspect[0]), aspect[1])
    fallback = (min(height, round(width / nearest)), min(width, round(height * nearest)))
    tall = jnp.where(fits.any(), tall[first], fallback[0])
    wide = jnp.where(fits.any(), wide[first], fallback[1])
    place = lambda key, room: jax.random.randint(key, (), 0, room + 1)
    top = jnp.where(fits.any(), place(top_key, height - tall), (height - tall) // 2)
    left = jnp.where(fits.any(), place(left_key, width - wide), (width - wide) // 2)
    return Box(top, left, tall, wide)
