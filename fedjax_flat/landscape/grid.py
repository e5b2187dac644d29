"""Loss and error on lines, surfaces and planes: a grid of points, in compiled batches of a row."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

from fedjax_flat import errors, memory
from fedjax_flat.curvature.data_loss import DataLoss
from fedjax_flat.landscape.directions import Plane, check_same_shapes

Progress = Callable[[Iterable[int]], Iterable[int]]


class Grid(NamedTuple):
    """loss[i, j] and error[i, j], 1 - the task's score, at (x[i], y[j])."""

    x: np.ndarray
    y: np.ndarray
    loss: np.ndarray
    error: np.ndarray


class Line(NamedTuple):
    """loss[i] and error[i] at first + x[i] (second - first)."""

    x: np.ndarray
    loss: np.ndarray
    error: np.ndarray

    @property
    def barrier(self) -> float:
        """How far the loss rises above the straight line between the ends, at most; or 0."""
        inside = (self.x >= 0) & (self.x <= 1)
        ends = np.interp([0.0, 1.0], self.x, self.loss)
        straight = ends[0] + (ends[1] - ends[0]) * self.x
        return float(max(0.0, np.max((self.loss - straight)[inside])))


def symmetric(radius: float, points: int) -> np.ndarray:
    """An odd number of points from -radius to radius with 0 exactly in the middle."""
    check_points(points, least=1)
    if points < 3 or points % 2 == 0:
        raise errors.UsageError(
            f"a grid of {points} points has no centre: expected an odd number, 3 or more."
        )
    errors.positive("radius", radius)
    half = np.linspace(0, radius, points // 2 + 1)
    return np.concatenate([-half[:0:-1], half])


def grid(
    loss: DataLoss,
    params: Any,
    directions: tuple[Any, Any],
    x: np.ndarray,
    y: np.ndarray,
    *,
    start: Grid | None = None,
    progress: Progress = lambda rows: rows,
    after_row: Callable[[Grid], None] = lambda done: None,
) -> Grid:
    """At params + x[i] directions[0] + y[j] directions[1], row i after row i.

    `start` is an unfinished grid to go on with: its finished rows are kept. `after_row` sees the
    grid after every row.
    """
    shape = (len(x), len(y))
    if start is None:
        check_centre(loss, params)
        start = Grid(x, y, np.full(shape, np.nan), np.full(shape, np.nan))
    losses, wrong = start.loss.copy(), start.error.copy()
    missing = [i for i in range(len(x)) if np.isnan(losses[i]).all()]
    for i in progress(missing):
        points = np.stack([np.full(len(y), x[i]), y], axis=1)
        losses[i], wrong[i] = _at(loss, params, directions, points)
        after_row(Grid(x, y, losses.copy(), wrong.copy()))
    return Grid(x, y, losses, wrong)


def line(
    loss: DataLoss, first: Any, second: Any, *, points: int = 21, margin: float = 0.0
) -> Line:
    """From the first model (x = 0) to the second (x = 1), and beyond by `margin` on both sides."""
    check_same_shapes(first, second)
    check_points(points)
    check_centre(loss, first)
    inside = np.linspace(0, 1, points)
    beyond = np.arange(1, int(margin * (points - 1)) + 1) / (points - 1)
    x = np.concatenate([-beyond[::-1], inside, 1 + beyond])
    direction = optax.tree.sub(second, first)
    return Line(x, *_at(loss, first, (direction,), x[:, None]))


def plane_axes(plane: Plane, points: int, margin: float = 0.3) -> tuple[np.ndarray, np.ndarray]:
    """Axes that show all models of a plane, with `margin` of their extent around them."""
    check_points(points)
    low, high = plane.points.min(0), plane.points.max(0)
    room = margin * np.max(high - low)
    x, y = (np.linspace(a - room, b + room, points) for a, b in zip(low, high, strict=True))
    return x, y


def check_points(points: int, least: int = 2) -> None:
    """Refuses a number of points per axis of which a grid has none, or more than fit anywhere."""
    errors.at_least("points", points, least)
    memory.check(
        f"a grid of {points} x {points} points", 2 * 8 * points**2, "Ask for fewer points."
    )


def check_centre(loss: DataLoss, params: Any) -> None:
    """Refuses to draw around a point where the loss is not finite."""
    value = float(loss.value(params))
    if not np.isfinite(value):
        raise errors.UsageError(f"the loss at the centre is {value}: there is nothing to draw.")


def _at(loss, params, directions, points) -> tuple[np.ndarray, np.ndarray]:
    """(loss, 1 - score) at each point; without a score, NaN."""
    means = loss.along(params, directions, jnp.asarray(points, jnp.float32))
    value = np.asarray(means["loss"], float)
    if not loss.score:
        return value, np.full_like(value, np.nan)
    return value, 1 - np.asarray(means[loss.score], float)
