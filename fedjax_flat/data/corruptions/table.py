"""The 19 corruptions by their published names, with their parameters for severities 1 to 5.

x is (n, 32, 32, 3) of float32, 0 to 1; so is what a corruption makes of it, before it is clipped.
"""

import io
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from fedjax_flat import errors
from fedjax_flat.data.corruptions import tools, weather
from fedjax_flat.data.corruptions.tools import Streams

SEVERITIES = (1, 2, 3, 4, 5)
_TOGETHER = 500  # images at once: few enough for the cache


class Corruption(NamedTuple):
    """`apply(x, streams, *parameters[severity - 1])`."""

    apply: Callable[..., np.ndarray]
    parameters: Sequence[tuple[Any, ...]]


def corrupt(images: np.ndarray, name: str, severity: int, seed: int = 0) -> np.ndarray:
    """Images of 32x32x3 bytes, each corrupted; image i always in the same way."""
    found = errors.lookup("corruption", name, CORRUPTIONS)
    if severity not in SEVERITIES:
        raise errors.UsageError(f"severity {severity}: expected 1, 2, 3, 4 or 5.")
    images = np.asarray(images)
    if images.shape[1:] != (32, 32, 3) or images.dtype != np.uint8:
        raise errors.UsageError(
            f"corruption of {images.dtype} of shape {images.shape}: expected bytes of shape "
            "(images, 32, 32, 3), for which the parameters are."
        )
    parameters = found.parameters[severity - 1]
    out = np.empty_like(images)
    for start in range(0, len(images), _TOGETHER):
        part = images[start : start + _TOGETHER]
        purpose = (seed, zlib.crc32(name.encode()), severity)
        streams = Streams([(*purpose, start + i) for i in range(len(part))])
        changed = found.apply(part.astype(np.float32) / 255, streams, *parameters)
        out[start : start + _TOGETHER] = tools.bytes_of(changed)
    return out


def gaussian_noise(x: np.ndarray, streams: Streams, deviation: float) -> np.ndarray:
    """The same everywhere."""
    return x + deviation * streams.normal(*x.shape[1:])


def shot_noise(x: np.ndarray, streams: Streams, photons: float) -> np.ndarray:
    """Poisson, of so many photons where it is white."""
    return streams.draw(lambda g, i: g.poisson(x[i] * photons)).astype(np.float32) / photons


def impulse_noise(x: np.ndarray, streams: Streams, share: float) -> np.ndarray:
    """A share of all values is 0 or 1."""
    draw = streams.uniform(0, 1, *x.shape[1:])
    return np.where(draw < share, (draw < share / 2).astype(np.float32), x)


def speckle_noise(x: np.ndarray, streams: Streams, deviation: float) -> np.ndarray:
    """In proportion to the brightness."""
    return x + x * deviation * streams.normal(*x.shape[1:])


def gaussian_blur(x: np.ndarray, streams: Streams, sigma: float) -> np.ndarray:
    """Soft."""
    del streams
    return tools.gaussian(x, sigma)


def defocus_blur(x: np.ndarray, streams: Streams, radius: float, alias_blur: float) -> np.ndarray:
    """Every point a disk."""
    del streams
    return tools.correlate(x, tools.disk(radius, alias_blur))


def glass_blur(
    x: np.ndarray, streams: Streams, sigma: float, reach: int, times: int
) -> np.ndarray:
    """Pixels take the place of a neighbour, between two soft blurs.

    The published code means to exchange two pixels; both come to have the neighbour's value.
    """
    x = tools.bytes_of(tools.gaussian(x, sigma)).astype(np.float32) / 255
    count, side = len(x), x.shape[1]
    places = range(side - reach, reach, -1)
    moves = streams.integers(2 * reach, times, len(places), len(places), 2) - reach
    every = np.arange(count)
    for time in range(times):
        for a, row in enumerate(places):
            for b, column in enumerate(places):
                right, down = moves[:, time, a, b].T
                x[:, row, column] = x[every, row + down, column + right]
    return tools.gaussian(x, sigma)


def motion_blur(x: np.ndarray, streams: Streams, radius: int, sigma: float) -> np.ndarray:
    """Along an angle between -45 and 45 degrees."""
    return tools.motion(x, radius, sigma, streams.uniform(-45, 45))


def zoom_blur(x: np.ndarray, streams: Streams, furthest: float) -> np.ndarray:
    """The mean of the image and of itself, enlarged from 1 to `furthest` times in steps of 0.01."""
    del streams
    side = x.shape[1]
    factors = np.arange(1, furthest, 0.01)
    total = np.eye(side * side, dtype=np.float32)  # over all pixels of an image at once
    for factor in factors:
        weights = tools.zoom_weights(side, factor)
        total += np.kron(weights, weights)
    pixels = x.transpose(0, 3, 1, 2).reshape(-1, side * side)
    blurred = pixels @ (total / (len(factors) + 1)).T
    return blurred.reshape(-1, x.shape[3], side, side).transpose(0, 2, 3, 1)


def contrast(x: np.ndarray, streams: Streams, share: float) -> np.ndarray:
    """A share of the difference from each channel's mean."""
    del streams
    mean = x.mean((1, 2), keepdims=True)
    return (x - mean) * share + mean


def brightness(x: np.ndarray, streams: Streams, more: float) -> np.ndarray:
    """More value, of the same hue and saturation (HSV)."""
    del streams
    value = x.max(-1, keepdims=True)
    brighter = np.clip(value + more, 0, 1)
    return np.where(value > 0, x * (brighter / np.maximum(value, 1e-6)), brighter)


def saturate(x: np.ndarray, streams: Streams, times: float, more: float) -> np.ndarray:
    """Another saturation, of the same hue and value (HSV); the hue of grey is red."""
    del streams
    value = x.max(-1, keepdims=True)
    below = value - x
    saturation = below.max(-1, keepdims=True) / np.maximum(value, 1e-6)
    wanted = np.clip(times * saturation + more, 0, 1)
    grey = value * (1 - wanted * np.array([0, 1, 1], np.float32))
    coloured = value - below * (wanted / np.maximum(saturation, 1e-6))
    return np.where(saturation > 0, coloured, grey)


def jpeg_compression(x: np.ndarray, streams: Streams, quality: int) -> np.ndarray:
    """Written and read again."""
    del streams

    def again(image):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=quality)
        return np.asarray(Image.open(file))

    return _each(again, x)


def pixelate(x: np.ndarray, streams: Streams, share: float) -> np.ndarray:
    """In fewer, larger pixels."""
    del streams
    side, few = x.shape[1], int(x.shape[1] * share)
    box = Image.Resampling.BOX
    return _each(
        lambda image: np.asarray(
            Image.fromarray(image).resize((few, few), box).resize((side, side), box)
        ), x
    )


def elastic_transform(
    x: np.ndarray, streams: Streams, strength: float, sigma: float, shift: float
) -> np.ndarray:
    """Three points moved by up to `shift`, then every pixel by a smooth field of `strength`."""
    count, side = len(x), x.shape[1]
    middle, reach = side // 2, side // 3
    points = np.array([[1, 1], [1, -1], [-1, -1]]) * reach + middle  # (x, y)
    moved = points + streams.uniform(-shift, shift, 3, 2)
    # The affine map from where three points go to where they come from.
    ones = np.ones((count, 3, 1))
    come_from = np.linalg.solve(np.concatenate([moved, ones], 2), np.tile(points, (count, 1, 1)))
    rows, columns = np.mgrid[:side, :side].astype(np.float32)
    at = np.stack([columns, rows, np.ones_like(rows)], -1) @ come_from[:, None]
    x = tools.sample(x, at[..., 1], at[..., 0], repeat=False)
    if not strength:
        return x
    field = [
        strength * tools.gaussian(streams.uniform(-1, 1, side, side), sigma, mode="reflect",
                                  truncate=3)
        for _ in range(2)
    ]
    return tools.sample(x, rows + field[0], columns + field[1], repeat=True)


def _each(f: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    """Of images as bytes, one by one; back as 0 to 1, so that `bytes_of` finds the same bytes."""
    stored = np.round(x * 255).astype(np.uint8)
    return (np.stack([f(image) for image in stored]).astype(np.float32) + 0.25) / 255


def _one(*values: float) -> list[tuple[float, ...]]:
    return [(v,) for v in values]


CORRUPTIONS: dict[str, Corruption] = {
    "gaussian_noise": Corruption(gaussian_noise, _one(0.04, 0.06, 0.08, 0.09, 0.10)),
    "shot_noise": Corruption(shot_noise, _one(500, 250, 100, 75, 50)),
    "impulse_noise": Corruption(impulse_noise, _one(0.01, 0.02, 0.03, 0.05, 0.07)),
    "speckle_noise": Corruption(speckle_noise, _one(0.06, 0.1, 0.12, 0.16, 0.2)),
    "gaussian_blur": Corruption(gaussian_blur, _one(0.4, 0.6, 0.7, 0.8, 1)),
    "defocus_blur": Corruption(
        defocus_blur, [(0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)]
    ),
    "glass_blur": Corruption(
        glass_blur, [(0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)]
    ),
    "motion_blur": Corruption(motion_blur, [(6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)]),
    "zoom_blur": Corruption(zoom_blur, _one(1.06, 1.11, 1.16, 1.21, 1.26)),
    "snow": Corruption(weather.snow, [
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95), (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9), (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ]),
    "frost": Corruption(
        weather.frost, [(1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)]
    ),
    "fog": Corruption(weather.fog, [(0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)]),
    "spatter": Corruption(weather.spatter, [
        (0.62, 0.1, 0.7, 0.7, 0.5, False), (0.65, 0.1, 0.8, 0.7, 0.5, False),
        (0.65, 0.3, 1, 0.69, 0.5, False), (0.65, 0.1, 0.7, 0.69, 0.6, True),
        (0.65, 0.1, 0.5, 0.68, 0.6, True),
    ]),
    "brightness": Corruption(brightness, _one(0.05, 0.1, 0.15, 0.2, 0.3)),
    "contrast": Corruption(contrast, _one(0.75, 0.5, 0.4, 0.3, 0.15)),
    "saturate": Corruption(saturate, [(0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)]),
    "jpeg_compression": Corruption(jpeg_compression, _one(80, 65, 58, 50, 40)),
    "pixelate": Corruption(pixelate, _one(0.95, 0.9, 0.85, 0.75, 0.65)),
    "elastic_transform": Corruption(elastic_transform, [
        (0, 0, 2.56), (1.6, 6.4, 2.24), (2.56, 1.92, 1.92), (3.2, 1.28, 1.6), (3.2, 0.96, 0.96),
    ]),
}
