"""Directions in parameter space: random and filter-normalised, and the plane through three models.

Li et al., "Visualizing the loss landscape of neural nets" (NeurIPS 2018): every filter of a
Gaussian direction gets the length of the model's own filter, so that rescaling consecutive layers
leaves the picture alone. In Flax a filter is a slice along the last axis.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_flat import errors


def filter_normalised(key: jax.Array, params: Any, *, one_dimensional: bool = False) -> Any:
    """A Gaussian direction with the filters' lengths of `params`.

    Biases and normalisation parameters stay where they are, unless `one_dimensional`: then each of
    their entries is a filter.
    """
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))

    def direction(key, w):
        if w.ndim < 2:
            return w * jax.random.rademacher(key, w.shape, w.dtype) if one_dimensional else 0 * w
        d = jax.random.normal(key, w.shape, w.dtype)
        axes = tuple(range(w.ndim - 1))
        length = lambda x: jnp.sqrt(jnp.sum(jnp.square(x), axis=axes, keepdims=True))
        own, drawn = length(w), length(d)
        return d * jnp.broadcast_to(own / jnp.where(drawn > 0, drawn, 1), d.shape)

    return jax.tree.unflatten(structure, map(direction, keys, leaves))


class Plane(NamedTuple):
    """origin + x u + y v with orthonormal u and v; `points`: the models' (x, y), one per row."""

    origin: Any
    u: Any
    v: Any
    points: np.ndarray

    def coordinates(self, params: Any) -> np.ndarray:
        """Where `params` falls when projected onto the plane."""
        away = optax.tree.sub(params, self.origin)
        return np.array([float(optax.tree.vdot(away, d)) for d in (self.u, self.v)])


def plane(first: Any, second: Any, third: Any, *further: Any) -> Plane:
    """Through three models: the first at the origin, the second on the x axis."""
    for other in (second, third, *further):
        check_same_shapes(first, other)
    toward = optax.tree.sub(second, first)
    length = float(optax.tree.norm(toward))
    if length == 0:
        raise errors.UsageError("the first two models of the plane are the same model.")
    u = optax.tree.scale(1 / length, toward)
    away = optax.tree.sub(third, first)
    rest = optax.tree.sub(away, optax.tree.scale(float(optax.tree.vdot(away, u)), u))
    height, whole = float(optax.tree.norm(rest)), float(optax.tree.norm(away))
    if height <= 1e-4 * max(length, whole):
        raise errors.UsageError(
            "the three models lie on a line, which spans no plane. Use --line for two of them."
        )
    v = optax.tree.scale(1 / height, rest)
    made = Plane(first, u, v, np.zeros((0, 2)))
    points = [made.coordinates(m) for m in (first, second, third, *further)]
    return made._replace(points=np.stack(points))


def check_same_shapes(a: Any, b: Any) -> None:
    """Refuses two models that are not points of one space."""
    named = lambda tree: {
        jax.tree_util.keystr(path): w.shape for path, w in jax.tree_util.tree_leaves_with_path(tree)
    }
    if named(a) != named(b):
        sizes = [sum(w.size for w in jax.tree.leaves(tree)) for tree in (a, b)]
        raise errors.UsageError(
            f"models of different shapes ({sizes[0]} and {sizes[1]} parameters) are not points of "
            "one space."
        )
