"""Sharpness-aware gradients: the gradient at the worst point nearby instead of the one at w.

SAM: Foret et al., "Sharpness-aware minimization for efficiently improving generalization" (ICLR
2021). ASAM: Kwon et al., "ASAM: adaptive sharpness-aware minimization for scale-invariant learning
of deep neural networks" (ICML 2021). On clients: Caldarola et al., "Improving generalization in
federated learning by seeking flat minima" (ECCV 2022).

    SAM     eps = rho g / ||g||
    ASAM    eps = rho T^2 g / ||T g||,     T = |w| + eta for kernels, 1 elsewhere
    then    gradient at w + eps, on the same examples and with the same key; the step is taken at w

Norms are over all parameters. A vanishing gradient gives a vanishing eps. As in the released code
the ascent sees the loss alone: put weight decay after these transforms. Kernels are the leaves with
two axes or more; `scale="all"` is T = |w| + eta for biases and normalisation parameters too.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_flat import errors
from fedjax_flat.client.optimizer import Schedule, rate_of

EPSILON = 1e-16  # in the denominators, as in the released code


def sam(rho: float | Schedule) -> optax.GradientTransformationExtraArgs:
    """Replaces the gradient by the one at w + rho g / ||g||; `rho` may depend on the round."""
    return _ascend(rho, lambda params, grads: grads, lambda params, direction: direction)


def asam(
    rho: float | Schedule, eta: float = 0.2, *, scale: str = "kernels"
) -> optax.GradientTransformationExtraArgs:
    """The same in a neighbourhood scaled by each weight's own size, `scale`: kernels | all."""
    least_axes = errors.lookup("scale", scale, {"kernels": 2, "all": 0})
    errors.at_least("eta", eta, 0)

    def scaled(params, tree):
        return jax.tree.map(
            lambda w, g: (jnp.abs(w) + jnp.asarray(eta, w.dtype)) * g
            if w.ndim >= least_axes
            else g,
            params,
            tree,
        )

    return _ascend(rho, scaled, scaled)


def warm_up(start: float, end: float, rounds: int, *, first: int = 1) -> Schedule:
    """rho(t) = start + (end - start) t / rounds up to t = `rounds`; the first round is `first`."""

    def rho(round):
        progress = (round + first).astype(jnp.float32) / max(rounds, 1)
        return start + (end - start) * jnp.minimum(progress, 1.0)

    return rho


def _ascend(
    rho: float | Schedule, before: Callable[..., Any], after: Callable[..., Any]
) -> optax.GradientTransformationExtraArgs:
    """The gradient at w + rho after(d / ||d||), d = before(g)."""
    if not callable(rho):
        errors.at_least("rho", rho, 0)

    def update(grads, state, params, *, grad_fn, round=0, **extra):
        del extra
        ascent = after(params, scaled_to(rate_of(rho, round), before(params, grads)))
        return grad_fn(optax.apply_updates(params, ascent)), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def scaled_to(length: Any, tree: Any) -> Any:
    """`tree` with norm `length`; zero stays zero."""
    norm = jnp.sqrt(optax.tree.vdot(tree, tree))  # on CPU half the time of a sum of squares
    factor = jnp.asarray(length, jnp.float32) / (norm + EPSILON)
    return jax.tree.map(lambda x: factor.astype(x.dtype) * x, tree)
