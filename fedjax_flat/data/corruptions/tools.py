"""What the corruptions are made of, for stacks of images: (n, height, width, channels), 0 to 1.

NumPy and SciPy only. Every image has a random stream of its own, so that it looks the same whatever
stands beside it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import ndimage

GREY = np.array([0.299, 0.587, 0.114], np.float32)  # luma of ITU-R BT.601


class Streams:
    """One generator per image; every draw has the images first."""

    def __init__(self, seeds: Sequence[Sequence[int]]):
        self._each = [np.random.default_rng(list(seed)) for seed in seeds]

    def draw(self, f: Callable[[np.random.Generator, int], Any]) -> np.ndarray:
        """f(generator, place in the stack) of every image."""
        return np.stack([f(g, i) for i, g in enumerate(self._each)])

    def normal(self, *shape: int) -> np.ndarray:
        """Of mean 0 and deviation 1."""
        return self.draw(lambda g, i: g.standard_normal(shape, np.float32))

    def uniform(self, low: float, high: float, *shape: int) -> np.ndarray:
        """Between `low` and `high`."""
        return self.draw(lambda g, i: g.uniform(low, high, shape).astype(np.float32))

    def integers(self, high: int, *shape: int) -> np.ndarray:
        """0 to `high` - 1."""
        return self.draw(lambda g, i: g.integers(high, size=shape))


def bytes_of(x: np.ndarray) -> np.ndarray:
    """0 .. 1 as 0 .. 255; fractions are cut off, as in the published arrays."""
    return (np.clip(x, 0, 1) * 255).astype(np.uint8)


def gaussian(x: np.ndarray, sigma: float, *, mode: str = "nearest", truncate: float = 4.0):
    """A Gaussian blur of every image; `x` may lack channels."""
    widths = (0, sigma, sigma, 0)[: x.ndim]
    return ndimage.gaussian_filter(x, widths, mode=mode, truncate=truncate)


def correlate(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Every image with one small kernel; mirrored at the border, whose pixels are not repeated."""
    shape = (1, *kernel.shape, 1)[: x.ndim]
    return ndimage.correlate(x, kernel.reshape(shape).astype(x.dtype), mode="mirror")


def disk(radius: float, alias_blur: float) -> np.ndarray:
    """A disk of sum 1, smoothed by a 3x3 Gaussian."""
    reach = int(np.ceil(radius)) + 1
    line = np.arange(-reach, reach + 1)
    inside = (line[:, None] ** 2 + line[None, :] ** 2 <= radius**2).astype(np.float32)
    around = np.exp(-(np.arange(-1, 2) ** 2) / (2 * alias_blur**2))
    around /= around.sum()
    return ndimage.convolve(inside / inside.sum(), np.outer(around, around), mode="constant")


def motion(x: np.ndarray, radius: int, sigma: float, degrees: np.ndarray) -> np.ndarray:
    """A trail to one side, along each image's own angle, as ImageMagick's motion blur makes it.

    Pixel p becomes sum_i k_i x(p + round(i (cos, sin))) for i = 0 .. 2 radius, with k_i in
    proportion to exp(-i^2 / (2 sigma^2)); pixels of the border go on beyond it.
    """
    taps = np.arange(2 * radius + 1)
    kernel = np.exp(-(taps**2) / (2 * sigma**2))
    kernel = (kernel / kernel.sum()).astype(np.float32)
    angle = np.radians(degrees)
    count, height, width = x.shape[:3]
    out = np.zeros_like(x)
    for i in taps[kernel > 1e-5]:
        down = np.ceil(i * np.sin(angle) - 0.5).astype(int)[:, None]
        right = np.ceil(i * np.cos(angle) - 0.5).astype(int)[:, None]
        rows = np.clip(np.arange(height) + down, 0, height - 1)
        columns = np.clip(np.arange(width) + right, 0, width - 1)
        out += kernel[i] * x[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None]]
    return out


def zoom_weights(side: int, factor: float) -> np.ndarray:
    """(side, side): the middle of a line of pixels, enlarged by `factor`; linear in between."""
    kept = int(np.ceil(side / factor))
    start = (side - kept) // 2
    length = round(kept * factor)
    cut = (length - side) // 2
    at = (np.arange(side) + cut) * (kept - 1) / (length - 1)
    left = np.minimum(at.astype(int), kept - 2) if kept > 1 else np.zeros(side, int)
    part = at - left
    weights = np.zeros((side, side), np.float32)
    weights[np.arange(side), start + left] = 1 - part
    weights[np.arange(side), start + np.minimum(left + 1, kept - 1)] += part
    return weights


def sample(x: np.ndarray, rows: np.ndarray, columns: np.ndarray, *, repeat: bool) -> np.ndarray:
    """Bilinear between pixels, at points (n, height, width); mirrored at the border.

    With `repeat` the pixel at the border stands there twice.
    """
    top, left = np.floor(rows), np.floor(columns)
    down = (rows - top)[..., None].astype(np.float32)
    right = (columns - left)[..., None].astype(np.float32)
    which = np.arange(len(x))[:, None, None]

    def pixel(i, j):
        return x[which, _mirrored(i, x.shape[1], repeat), _mirrored(j, x.shape[2], repeat)]

    above = (1 - right) * pixel(top, left) + right * pixel(top, left + 1)
    below = (1 - right) * pixel(top + 1, left) + right * pixel(top + 1, left + 1)
    return (1 - down) * above + down * below


def _mirrored(index: np.ndarray, length: int, repeat: bool) -> np.ndarray:
    """Any whole number as an index below `length`, going to and fro."""
    period = 2 * length if repeat else 2 * length - 2
    index = index.astype(int) % period
    return np.where(index < length, index, period - index - repeat)


def plasma(streams: Streams, side: int, decay: float) -> np.ndarray:
    """Clouds, 0 to 1: (n, side, side), by the diamond-square algorithm on a torus.

    `side` is a power of two. A point is the mean of its four neighbours plus a uniform draw, whose
    reach begins at 100^2 and falls by decay^2 from one scale to the next.
    """
    height = np.zeros((len(streams.draw(lambda g, i: 0)), side, side), np.float32)
    step, reach = side, 100.0
    while step >= 2:
        half, cells = step // 2, side // step
        wobble = streams.uniform(-1, 1, 3, cells, cells) * reach**2
        around = lambda x, axis, by: x + np.roll(x, by, axis)
        corners = height[:, ::step, ::step]
        centres = around(around(corners, 1, -1), 2, -1) / 4 + wobble[:, 0]
        height[:, half::step, half::step] = centres
        across = around(centres, 1, 1) + around(corners, 2, -1)
        height[:, ::step, half::step] = across / 4 + wobble[:, 1]
        along = around(centres, 2, 1) + around(corners, 1, -1)
        height[:, half::step, ::step] = along / 4 + wobble[:, 2]
        step, reach = half, reach / decay
    height -= height.min((1, 2), keepdims=True)
    return height / height.max((1, 2), keepdims=True)


def edges(x: np.ndarray, low: float, high: float) -> np.ndarray:
    """Canny's edges of a stack of grey images, 0 to 255: thin, and joined to a strong one.

    Canny, "A computational approach to edge detection" (1986), with the L1 norm of Sobel's
    gradient, its direction one of four.
    """
    x = x.astype(np.float32)
    slope = lambda axis: ndimage.correlate1d(
        ndimage.correlate1d(x, [-1, 0, 1], axis, mode="nearest"), [1, 2, 1], 3 - axis,
        mode="nearest",
    )
    down, right = slope(1), slope(2)
    size = np.abs(down) + np.abs(right)
    direction = np.round(np.arctan2(down, right) / (np.pi / 4)).astype(int) % 4
    padded = np.pad(size, ((0, 0), (1, 1), (1, 1)))
    height, width = x.shape[1:]
    thin = np.zeros(x.shape, bool)
    for d, (i, j) in enumerate(((0, 1), (1, 1), (1, 0), (1, -1))):
        ahead = padded[:, 1 + i : 1 + i + height, 1 + j : 1 + j + width]
        behind = padded[:, 1 - i : 1 - i + height, 1 - j : 1 - j + width]
        thin |= (direction == d) & (size > behind) & (size >= ahead)
    within = np.zeros((3, 3, 3), bool)
    within[1] = True  # neighbours in the same image
    parts, count = ndimage.label(thin & (size > low), within)
    strong = np.zeros(count + 1, bool)
    strong[parts[thin & (size > high)]] = True
    strong[0] = False
    return strong[parts]


def equalised(x: np.ndarray) -> np.ndarray:
    """Grey values, whole numbers below 256, spread so that each image has all about as often."""
    count, pixels = len(x), x[0].size
    flat = x.reshape(count, -1).astype(int)
    bins = np.bincount((flat + 256 * np.arange(count)[:, None]).ravel(), minlength=256 * count)
    bins = bins.reshape(count, 256)
    lowest = np.take_along_axis(bins, flat.min(1, keepdims=True), 1)
    rest = np.maximum(pixels - lowest, 1)
    table = np.round((bins.cumsum(1) - lowest) * (255 / rest)).clip(0, 255)
    spread = np.take_along_axis(table, flat, 1)
    return np.where(pixels == lowest, flat, spread).reshape(x.shape).astype(np.float32)
