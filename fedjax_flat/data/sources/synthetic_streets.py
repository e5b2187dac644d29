"""Made-up streets: a long painted strip of houses, photographed at known positions in many lights.

No files are needed, and a seed decides every pixel. Every city has its own colours and its own
parallel streets, 300 m apart and 240 m long. A drive along a street takes a picture every 10 m or
so; a picture shows 40 m of houses, so that two within 25 m share a third of what they show. Of the
four drives through each street of a train city two are queries and two are of the database, each in
its own light: brightness, tint, a slope from left to right, noise, every fourth by night. Parked
cars are others in every drive. Two more cities are only tested on, by a drive for the database and
one of queries through each street.
"""

import numpy as np

from fedjax_flat.data.sources import places
from fedjax_flat.data.sources.base import SOURCES, Dataset, Source, channel_statistics
from fedjax_flat.data.sources.places import Views
from fedjax_flat.settings import Setting

LENGTH, STEP, VIEW, BLOCK = 240, 10, 40, 300  # metres
DRIVES, TESTED = 4, 2  # drives through each street of a train city; cities that are tested on
FINE = 4  # painted pixels for each pixel of a picture, in both directions


def synthetic_streets(
    data_dir=None, cities: int = 4, streets: int = 3, side: int = 32, seed: int = 0
) -> Dataset:
    """Squares of `side` pixels from `cities` train cities and two more."""
    del data_dir
    train: list[tuple] = []
    test: list[tuple] = []
    for city in range(cities + TESTED):
        tested = city >= cities
        name = f"{'test' if tested else 'city'}{city - cities if tested else city}"
        palette = np.random.default_rng([seed, 0, city]).uniform(60, 220, (4, 3))
        for street in range(streets):
            strip = painted(palette, np.random.default_rng([seed, 1, city, street]), side)
            for drive in range(2 if tested else DRIVES):
                rng = np.random.default_rng([seed, 2, city, street, drive])
                made = driven(strip, rng, side, night=drive % 4 == 3)
                made = (made[0], made[1] + (0, street * BLOCK))
                role = "query" if drive % 2 else "database"
                (test if tested else train).append((name, f"{role}-{street}-{drive}", *made))
    (images, views), tested_on = _stacked(train), _stacked(test)
    mean, std = channel_statistics("synthetic_streets", images)
    return places.dataset("synthetic_streets", (images, views), tested_on, max_value=255.0,
                          mean=mean, std=std)


def painted(palette: np.ndarray, rng: np.random.Generator, side: int) -> np.ndarray:
    """A street from end to end, with the half views beyond both ends.

    Its rows are those of pictures. Its columns are finer, each the mean of the `FINE` from there
    on, so that every `FINE`-th of them is a picture.
    """
    scale, height = FINE * side / VIEW, FINE * side  # painted pixels per metre
    width = round((LENGTH + VIEW) * scale)
    strip = np.empty((height, width, 3))
    strip[:] = np.linspace(235, 180, height)[:, None, None] * np.array([0.85, 0.93, 1.0])  # sky
    ground = round(0.85 * height)
    left = 0
    while left < width:
        right = min(left + round(rng.uniform(7, 20) * scale), width)
        top = round(rng.uniform(0.05, 0.55) * height)
        wall = palette[rng.integers(len(palette))] + rng.normal(0, 25, 3)
        strip[top:ground, left:right] = wall
        glass, door = rng.uniform(20, 240, 3), rng.uniform(10, 120, 3)
        storey, bay = rng.uniform(0.1, 0.2) * height, rng.uniform(2, 5) * scale
        rows = (np.arange(top, ground) - top) % storey / storey
        columns = np.arange(right - left) % bay / bay
        window = np.outer((rows > 0.35) & (rows < 0.8), (columns > 0.3) & (columns < 0.7))
        strip[top:ground, left:right][window] = glass
        at = left + round(rng.uniform(0.1, 0.7) * (right - left))
        strip[round(0.72 * height):ground, at:min(at + round(1.6 * scale), right)] = door
        left = right
    strip[ground:] = rng.uniform(70, 110)
    rows = np.clip(strip, 0, 255).reshape(side, FINE, width, 3).mean(1)
    return sum(rows[:, i : width - FINE + 1 + i] for i in range(FINE)) / FINE


def driven(
    strip: np.ndarray, rng: np.random.Generator, side: int, *, night: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(pictures, positions) of one drive in one light."""
    count, scale = LENGTH // STEP, side / VIEW  # pixels per metre
    x = np.clip(STEP * (np.arange(count) + 0.5) + rng.uniform(-3, 3, count), 0, LENGTH)
    lane = rng.uniform(-3, 3)
    light = rng.uniform(0.55, 1.25) * (0.35 if night else 1.0) * rng.uniform(0.8, 1.2, 3)
    slope = 1 + rng.uniform(-0.35, 0.35) * np.linspace(-1, 1, side)[:, None]
    pictures = np.empty((count, side, side, 3), np.uint8)
    for i, at in enumerate(x):
        left = min(round(at * scale * FINE), strip.shape[1] - FINE * side)
        view = strip[:, max(left, 0) :][:, : FINE * side : FINE].copy()
        for _ in range(rng.integers(0, 3)):
            car = round(rng.uniform(0, VIEW - 4) * scale)
            view[round(0.76 * side):round(0.9 * side), car : car + round(4 * scale)] = (
                rng.uniform(0, 255, 3)
            )
        view = view * light * slope + rng.normal(0, 5, view.shape)
        pictures[i] = np.rint(np.clip(view, 0, 255))
    return pictures, np.stack([x, np.full(count, lane)], 1)


def _stacked(drives: list[tuple]) -> tuple[np.ndarray, Views]:
    names, sequences, pictures, positions = zip(*drives, strict=True)
    each = [len(p) for p in pictures]
    sequence = np.repeat(sequences, each)
    query = np.char.startswith(sequence, "query")
    views = Views(np.repeat(names, each), sequence, query, np.concatenate(positions))
    return np.concatenate(pictures), views


SOURCES.add("synthetic_streets", Source(
    synthetic_streets,
    about="made-up streets photographed in changing light, for place recognition; a seed decides "
          "all",
    size="1,152 + 288 images of 32x32x3 (by default), 4 + 2 cities, 48 drives",
    licence="none: made when it is loaded",
    files="nothing",
    here=lambda folder: True,
    settings={
        "cities": Setting(4, "that are trained on", at_least=1, at_most=1000),
        "streets": Setting(3, "of each city", at_least=1, at_most=1000),
        "side": Setting(32, "pixels", at_least=8, at_most=1024),
        "seed": Setting(0, "of every pixel", at_least=0, below=2**32),
    },
))
