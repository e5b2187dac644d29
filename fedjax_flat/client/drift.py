"""What keeps a client near the others, as optax transforms between sharpness and optimiser.

Each changes the gradient g at w. `anchor` is the model the client received, `grad_fn` the gradient
of the same examples elsewhere; both come from the local loop.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax


def proximal(mu: float) -> optax.GradientTransformationExtraArgs:
    """g + mu (w - anchor), the gradient of mu / 2 ||w - anchor||^2."""
    return _stateless(lambda g, w, anchor, grad_fn: g + mu * (w - anchor))


def toward(target: Any, strength: float) -> optax.GradientTransformationExtraArgs:
    """g + strength (w - target): the same pull to a model that is not the anchor."""
    return _stateless(lambda g, w, anchor, grad_fn, t: g + strength * (w - t), target)


def shifted(correction: Any) -> optax.GradientTransformationExtraArgs:
    """g + correction."""
    return _stateless(lambda g, w, anchor, grad_fn, c: g + c, correction)


def blended(weight: float, direction: Any) -> optax.GradientTransformationExtraArgs:
    """weight g + (1 - weight) direction."""
    return _stateless(lambda g, w, anchor, grad_fn, d: weight * g + (1 - weight) * d, direction)


def dynamic(dual: Any, alpha: float) -> optax.GradientTransformationExtraArgs:
    """g - dual + alpha (w - anchor): FedDyn's regulariser."""
    return _stateless(lambda g, w, anchor, grad_fn, h: g - h + alpha * (w - anchor), dual)


def variance_reduced(mean_gradient: Any) -> optax.GradientTransformationExtraArgs:
    """g - (the same batch's gradient at the anchor) + mean_gradient."""
    return _stateless(lambda g, w, anchor, g0, c: g - g0 + c, mean_gradient, at_anchor=True)


def _stateless(
    leaf: Callable[..., jax.Array], *trees: Any, at_anchor: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Leaf by leaf from (g, w, anchor, gradient at the anchor if asked, leaves of `trees`)."""

    def update(grads, state, params, *, anchor, grad_fn, **extra):
        del extra
        there = grad_fn(anchor) if at_anchor else optax.tree.zeros_like(grads)
        return jax.tree.map(leaf, grads, params, anchor, there, *trees), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
