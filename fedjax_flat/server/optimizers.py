"""Server optimisers on the pseudo-gradient. From Python, any optax optimiser will do.

SGD with rate 1 is FedAvg, with momentum FedAvgM. The adaptive ones are those of Reddi et al.,
"Adaptive federated optimization" (ICLR 2021):

    m <- b1 m + (1 - b1) Delta
    v <- v + Delta^2                                   (FedAdagrad)
    v <- b2 v + (1 - b2) Delta^2                       (FedAdam)
    v <- v - (1 - b2) Delta^2 sign(v - Delta^2)        (FedYogi)
    w <- w - rate m / (sqrt(v) + tau)                  v starts at tau^2

`initial="zero"` starts v at 0, as PyTorch's Adagrad does. `epsilon="inside"` divides by
sqrt(v + tau), as some texts print it. `bias_correction` divides m by 1 - b1^t and v by 1 - b2^t and
starts v at 0, as Adam does (not for FedAdagrad, whose v is a sum).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_flat import errors


class AdaptiveState(NamedTuple):
    """m, v and the number of rounds."""

    momentum: Any
    second_moment: Any
    rounds: jax.Array


def sgd(learning_rate: float, momentum: float = 0.0) -> optax.GradientTransformation:
    """v <- momentum v + Delta, w <- w - rate v."""
    if not callable(learning_rate):
        errors.at_least("server learning rate", learning_rate, 0)
    errors.below_one("server momentum", momentum)
    return optax.sgd(learning_rate, momentum=momentum or None)


_SECOND_MOMENT: dict[str, Callable[..., jax.Array]] = {
    "adagrad": lambda v, square, b2: v + square,
    "adam": lambda v, square, b2: b2 * v + (1 - b2) * square,
    "yogi": lambda v, square, b2: v - (1 - b2) * square * jnp.sign(v - square),
}
ADAPTIVE = tuple(_SECOND_MOMENT)


def adaptive(
    kind: str,
    learning_rate: float,
    *,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    epsilon: str = "outside",
    initial: str = "tau",
    bias_correction: bool = False,
) -> optax.GradientTransformation:
    """FedAdagrad, FedAdam or FedYogi."""
    moment = errors.lookup("adaptive server optimizer", kind, _SECOND_MOMENT)
    denominator = errors.lookup(
        "epsilon",
        epsilon,
        {"outside": lambda v: jnp.sqrt(v) + tau, "inside": lambda v: jnp.sqrt(v + tau)},
    )
    errors.at_least("server learning rate", learning_rate, 0)
    errors.below_one("beta1", beta1)
    errors.below_one("beta2", beta2)
    errors.positive("tau", tau)
    corrects_second = bias_correction and kind != "adagrad"
    start = 0.0 if corrects_second else errors.lookup(
        "initial", initial, {"tau": tau**2, "zero": 0.0}
    )

    def init(params):
        return AdaptiveState(
            optax.tree.zeros_like(params),
            jax.tree.map(lambda w: jnp.full_like(w, start), params),
            jnp.zeros((), jnp.float32),
        )

    def update(delta, state, params=None):
        del params
        t = state.rounds + 1
        m = jax.tree.map(lambda m, d: beta1 * m + (1 - beta1) * d, state.momentum, delta)
        v = jax.tree.map(
            lambda v, d: moment(v, jnp.square(d), beta2), state.second_moment, delta
        )
        of_m = 1 - beta1**t if bias_correction else 1.0
        of_v = 1 - beta2**t if corrects_second else 1.0
        step = jax.tree.map(
            lambda m, v: -learning_rate * (m / of_m) / denominator(v / of_v), m, v
        )
        return step, AdaptiveState(m, v, t)

    return optax.GradientTransformation(init, update)
