"""How much the loss rises nearby: S = max over ||eps|| <= rho of f(w + eps) - f(w), estimated.

    first_order         rho ||g||
    ascent              along the ascent of SAM or ASAM: one step
    projected_ascent    several gradient steps, each put back onto the ball
    random_direction    the largest of several random unit directions

Each is a lower bound of S but the first, which is its linear part. The trace of the Hessian, the
fourth common measure, is `curvature.trace`.
"""

from typing import Any

import jax
import optax

from fedjax_flat import errors
from fedjax_flat.client.sharpness import asam, sam, scaled_to
from fedjax_flat.curvature.data_loss import DataLoss


def first_order(loss: DataLoss, params: Any, rho: float) -> float:
    """rho ||g||."""
    errors.at_least("rho", rho, 0)
    return rho * float(optax.tree.norm(loss.gradient(params)))


def ascent(loss: DataLoss, params: Any, rho: float, eta: float | None = None) -> float:
    """f at SAM's perturbed point less f(w); with `eta`, at ASAM's."""
    transform = sam(rho) if eta is None else asam(rho, eta)
    moved, _ = transform.update(
        loss.gradient(params), transform.init(params), params, grad_fn=lambda p: p
    )
    return _rise(loss, params, moved)


def projected_ascent(
    loss: DataLoss, params: Any, rho: float, *, steps: int = 5, rate: float = 0.5
) -> float:
    """The largest rise among `steps` ascent steps of length `rate` rho inside the ball."""
    errors.at_least("rho", rho, 0)
    errors.at_least("steps", steps, 1)
    eps, largest = optax.tree.zeros_like(params), 0.0
    for _ in range(steps):
        gradient = loss.gradient(optax.tree.add(params, eps))
        eps = optax.tree.add(eps, scaled_to(rate * rho, gradient))
        length = float(optax.tree.norm(eps))
        if length > rho:
            eps = scaled_to(rho, eps)
        largest = max(largest, _rise(loss, params, optax.tree.add(params, eps)))
    return largest


def random_direction(
    loss: DataLoss, params: Any, rho: float, *, key: jax.Array, directions: int = 10
) -> float:
    """The largest rise at distance rho along `directions` random directions."""
    errors.at_least("rho", rho, 0)
    errors.at_least("directions", directions, 1)
    rises = []
    for i in range(directions):
        leaves, structure = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.fold_in(key, i), len(leaves))
        drawn = [jax.random.normal(k, w.shape, w.dtype) for k, w in zip(keys, leaves, strict=True)]
        step = scaled_to(rho, jax.tree.unflatten(structure, drawn))
        rises.append(_rise(loss, params, optax.tree.add(params, step)))
    return max(rises)


def _rise(loss: DataLoss, params: Any, moved: Any) -> float:
    return float(loss.value(moved)) - float(loss.value(params))
