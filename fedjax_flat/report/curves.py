"""Curves over rounds: means over seeds, at an even distance, against what was spent, thinned."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_flat.run import metrics

Records = list[dict[str, Any]]
AXES = {
    "round": "round", "bytes": "megabytes sent", "flops": "FLOPs of all clients",
    "seconds": "simulated seconds", "wall": "seconds of work",
}
_UNITS = {"bytes": 1e6}
MOST = 400  # points of a curve on the report page


def mean_curve(
    seeds: Sequence[Records], **selection
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rounds, mean, deviation) over runs, of the rounds that all of them have.

    The last rounds are evaluated more often than the others; of these, as many are shown as
    elsewhere, or a curve would seem to become unsteady there.
    """
    curves = [dict(zip(*metrics.curve(records, **selection), strict=True)) for records in seeds]
    rounds = np.array([t for t in curves[0] if all(t in other for other in curves)], int)
    ends = list(metrics.phase_ends(seeds[0]).values())
    looked = np.unique([r["round"] for r in seeds[0] if r["split"] == selection.get("split")])
    looked = np.union1d(looked, rounds).astype(int)  # a model that begins late began in between
    kept = looked[even(looked, ends)]
    rounds = rounds[np.isin(rounds, kept) | (np.arange(len(rounds)) == len(rounds) - 1)]
    values = np.array([[curve[t] for t in rounds] for curve in curves], float)
    return rounds, values.mean(axis=0), values.std(axis=0)


def even(rounds: np.ndarray, ends: Sequence[int] = ()) -> np.ndarray:
    """Which rounds are as far apart as the first two, in every phase anew; and the last of each."""
    keep = np.zeros(len(rounds), bool)
    begin = -1.0
    for end in [*ends[:-1], np.inf]:
        inside = np.flatnonzero((rounds > begin) & (rounds <= end))
        if len(inside):
            before = rounds[inside[0]] if begin < 0 else begin
            step = next((t - before for t in rounds[inside] if t > before), 1)
            last = -np.inf
            for i in inside:
                if rounds[i] - last >= step:
                    keep[i], last = True, rounds[i]
            keep[inside[-1]] = True
        begin = end
    return keep


def along(seeds: Sequence[Records], axis: str, rounds: np.ndarray) -> np.ndarray | None:
    """What was spent up to each of the rounds, the mean over seeds; None where it is not known."""
    if axis == "round":
        return rounds
    found = [metrics.running(records, axis) for records in seeds]
    if not all(len(each) > 1 and all(int(t) in each for t in rounds) for each in found):
        return None
    spent = np.mean([[each[int(t)] for t in rounds] for each in found], axis=0)
    return spent / _UNITS.get(axis, 1.0)


def thin(values: np.ndarray, most: int = MOST) -> np.ndarray:
    """Positions of at most `most` points: of as many stretches, the lowest and the highest."""
    count = len(values)
    if count <= most:
        return np.arange(count)
    edges = np.linspace(0, count, most // 2).astype(int)  # two fewer: the first and the last point
    shown = np.where(np.isfinite(values), values, -np.inf)
    chosen = {0, count - 1}
    for a, b in itertools.pairwise(edges):
        chosen |= {a + int(shown[a:b].argmin()), a + int(shown[a:b].argmax())}
    return np.array(sorted(chosen))


def smooth(values: np.ndarray, width: int = 9) -> np.ndarray:
    """Running mean with a window that shrinks at the ends."""
    width = min(width, len(values))
    if width < 2:
        return values
    ones = np.ones(width)
    return np.convolve(values, ones, "same") / np.convolve(np.ones(len(values)), ones, "same")
