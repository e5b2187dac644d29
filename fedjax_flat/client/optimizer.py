"""The client optimiser, an optax chain with extra arguments.

Weight decay acts at w: it enters after whatever a sharpness or drift transform made of the
gradient, and before momentum and the learning rate, as in PyTorch's SGD.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

Schedule = Callable[[jax.Array], jax.Array]


def sgd(
    learning_rate: float | Schedule,
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    gradient: tuple[optax.GradientTransformation, ...] = (),
) -> optax.GradientTransformationExtraArgs:
    """SGD after the transforms in `gradient`; the rate may be a function of the round."""
    parts = list(gradient)
    if weight_decay:
        parts.append(optax.add_decayed_weights(weight_decay))
    if momentum:
        parts.append(optax.trace(momentum))
    return optax.chain(*parts, scale_by_round(learning_rate))


def scale_by_round(learning_rate: float | Schedule) -> optax.GradientTransformationExtraArgs:
    """Multiplies by -learning_rate, or by -learning_rate(round) with the extra argument `round`."""

    def update(updates, state, params=None, *, round=0, **extra):
        del params, extra
        rate = learning_rate(round) if callable(learning_rate) else learning_rate
        return jax.tree.map(lambda u: -jnp.asarray(rate, u.dtype) * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
