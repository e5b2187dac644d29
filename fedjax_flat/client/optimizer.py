"""The client optimiser. Any optax optimiser will do; this is the papers' SGD.

Weight decay acts at w: it enters after whatever sharpness and drift made of the gradient and after
clipping, and before momentum and the learning rate, as in PyTorch's SGD.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

Schedule = Callable[[jax.Array], jax.Array]


def sgd(
    learning_rate: float | Schedule,
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    clip: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """SGD; `clip` is the largest gradient norm, 0 for any; the rate may depend on the round."""
    parts: list[optax.GradientTransformation] = []
    if clip:
        parts.append(optax.clip_by_global_norm(clip))
    if weight_decay:
        parts.append(optax.add_decayed_weights(weight_decay))
    if momentum:
        parts.append(optax.trace(momentum))
    return optax.chain(*parts, scale_by_round(learning_rate))


def rate_of(learning_rate: float | Schedule, round: Any) -> Any:
    """The rate of a round."""
    return learning_rate(round) if callable(learning_rate) else learning_rate


def scale_by_round(learning_rate: float | Schedule) -> optax.GradientTransformationExtraArgs:
    """Multiplies by -learning_rate, or by -learning_rate(round) with the extra argument `round`."""

    def update(updates, state, params=None, *, round=0, **extra):
        del params, extra
        rate = rate_of(learning_rate, round)
        return jax.tree.map(lambda u: -jnp.asarray(rate, u.dtype) * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
