"""Snow, frost, fog, spatter: layers that lie over an image. x is (n, 32, 32, 3), 0 to 1.

The published frost is cut out of photographs, which are not ours to ship: ours is drawn, crystals
that branch at 60 degrees over a dark haze, in the blue of ice. All else follows the published
parameters.
"""

import functools

import numpy as np
from PIL import Image, ImageDraw, ImageFilter
from scipy import ndimage

from fedjax_flat.data.corruptions import tools
from fedjax_flat.data.corruptions.tools import Streams

TURQUOISE = np.array([175, 238, 238], np.float32) / 255  # of water
MUD = np.array([63, 42, 20], np.float32) / 255


def fog(x: np.ndarray, streams: Streams, strength: float, decay: float) -> np.ndarray:
    """Clouds of `strength` in front, the whole scaled back to the image's brightest value."""
    brightest = x.max((1, 2, 3), keepdims=True)
    clouds = tools.plasma(streams, x.shape[1], decay)[..., None]
    return (x + strength * clouds) * brightest / (brightest + strength)


def snow(
    x: np.ndarray,
    streams: Streams,
    mean: float,
    deviation: float,
    zoom: float,
    threshold: float,
    radius: int,
    sigma: float,
    kept: float,
) -> np.ndarray:
    """Flakes from above and below, blurred by their fall, over a whitened image."""
    side = x.shape[1]
    flakes = mean + deviation * streams.normal(side, side)
    weights = tools.zoom_weights(side, zoom)
    flakes = weights @ flakes @ weights.T
    flakes = np.where(flakes < threshold, 0, flakes)
    flakes = tools.bytes_of(flakes).astype(np.float32)[..., None] / 255
    flakes = tools.motion(flakes, radius, sigma, streams.uniform(-135, -45))
    whitened = np.maximum(x, (x @ tools.GREY)[..., None] * 1.5 + 0.5)
    return kept * x + (1 - kept) * whitened + flakes + flakes[:, ::-1, ::-1]


def spatter(
    x: np.ndarray,
    streams: Streams,
    mean: float,
    deviation: float,
    blur: float,
    threshold: float,
    strength: float,
    mud: bool,
) -> np.ndarray:
    """Drops of water, lit from one side, or of mud."""
    liquid = tools.gaussian(mean + deviation * streams.normal(*x.shape[1:3]), blur)
    liquid = np.where(liquid < threshold, 0, liquid)
    if mud:
        cover = tools.gaussian((liquid > threshold).astype(np.float32), strength)
        cover = np.where(cover < 0.8, 0, cover)[..., None]
        return x * (1 - cover) + MUD * cover
    liquid = np.floor(liquid.clip(0, 1) * 255)
    away = ~tools.edges(liquid, 50, 150)
    distance = ndimage.distance_transform_edt(away, sampling=(1e6, 1, 1))  # within each image
    mean3 = np.full((3, 3), 1 / 9, np.float32)
    light = np.floor(tools.correlate(np.minimum(distance, 20).astype(np.float32), mean3) + 1e-4)
    light = tools.equalised(light)
    relief = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]], np.float32)
    light = np.round(tools.correlate(tools.correlate(light, relief).clip(0, 255), mean3))
    drops = liquid * light
    highest = drops.max((1, 2), keepdims=True)
    return x + (strength * drops / np.maximum(highest, 1e-6))[..., None] * TURQUOISE


def frost(x: np.ndarray, streams: Streams, kept: float, strength: float) -> np.ndarray:
    """Ice on the window: a piece of one of five drawn panes."""
    panes = _panes()
    side, room = x.shape[1], panes.shape[1] - x.shape[1]
    place = np.stack([streams.integers(len(panes)), streams.integers(room),
                      streams.integers(room)], 1)
    ice = np.stack([panes[p, i : i + side, j : j + side] for p, i, j in place])
    return kept * x + strength * ice


@functools.cache
def _panes(count: int = 5, side: int = 160) -> np.ndarray:
    """(count, side, side, 3): frosted windows, the same ones always."""
    return np.stack([_pane(np.random.default_rng([7, k]), side) for k in range(count)])


def _pane(random: np.random.Generator, side: int, scale: int = 4) -> np.ndarray:
    """Drawn large and made smaller, so that needles are thin and smooth."""
    image = Image.new("L", (side * scale, side * scale))
    pen = ImageDraw.Draw(image)
    for _ in range(80):
        start = random.uniform(0, side * scale, 2)
        _crystal(pen, random, start, random.uniform(0, 2 * np.pi), random.uniform(60, 220), 3)
    needles = image.filter(ImageFilter.GaussianBlur(scale / 3)).resize((side, side))
    power = 1 / np.maximum(np.hypot(*np.meshgrid(*(np.fft.fftfreq(side),) * 2)), 1 / side)
    waves = np.fft.fft2(random.standard_normal((side, side))) * power
    haze = np.fft.ifft2(waves).real
    haze = (haze - haze.min()) / (haze.max() - haze.min())
    ice = np.clip(0.95 * np.asarray(needles) / 255 + 0.05 + 0.4 * haze, 0, 1)
    blue = np.array([0.9, 0.97, 1.0])  # less red where the ice is thin
    return (ice[..., None] ** (1 / blue) * blue**0.5).astype(np.float32)


def _crystal(pen, random: np.random.Generator, start, angle: float, length: float, depth: int):
    """A needle, and smaller ones at 60 degrees to both of its sides."""
    heading = np.array([np.cos(angle), np.sin(angle)])
    end = start + length * heading
    pen.line([*start, *end], fill=int(random.integers(150, 256)), width=depth + 1)
    if depth == 0 or length < 8:
        return
    for part in np.arange(0.2, 0.95, 0.16):
        for turn in (np.pi / 3, -np.pi / 3):
            shorter = 0.42 * length * (1.1 - part) * random.uniform(0.6, 1.2)
            _crystal(pen, random, start + part * length * heading, angle + turn, shorter, depth - 1)
