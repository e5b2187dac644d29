"""FedSpeed: a prox-correction term and a gradient that looks ahead.

Sun et al., "FedSpeed: larger local interval, less communication round, and higher generalization
accuracy" (ICLR 2023).

    local step   e = rho g1,   g = (1 - a) g1 + a g(w + e)
                 w <- w - eta_l (g - h_k + (w - x) / lambda)
    afterwards   h_k <- h_k - (w_k - x) / lambda,   upload w_k - lambda h_k
    server       x <- mean of the uploads

The group's simulator normalises the ascent, e = rho g1 / ||g1||: option `normalised`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_flat import errors
from fedjax_flat.algorithms.base import Algorithm, Exchange, combine, difference, replies, zeros
from fedjax_flat.algorithms.method import Method
from fedjax_flat.client import Client, drift
from fedjax_flat.client.optimizer import Schedule, rate_of
from fedjax_flat.client.sharpness import EPSILON
from fedjax_flat.settings import Setting


def fedspeed(
    client: Client,
    *,
    rho: float | Schedule,
    alpha: float,
    prox: float,
    normalised: bool = False,
    weighting: str = "examples",
) -> Algorithm:
    """FedSpeed; `prox` is the paper's lambda, `alpha` its a."""
    reply = replies(weighting)
    errors.positive("prox", prox)
    if not 0 <= alpha <= 1:
        raise errors.UsageError(f"alpha = {alpha}: expected 0 to 1.")

    def init(variables, num_clients):
        del num_clients
        return variables, zeros(variables.params)

    def local(message, dual, data, round, key):
        trained, info, _ = client.train(
            message,
            data,
            key,
            round=round,
            drift=drift.dynamic(dual, 1 / prox),
            sharpness=quasi_gradient(rho, alpha, normalised),
        )
        delta = difference(message, trained)
        dual = combine(dual, 1 / prox, delta.params)
        corrected = combine(delta.params, prox, dual)  # x - (w_k - lambda h_k)
        return reply(data, dual, info, mean=delta._replace(params=corrected))

    def update(model, uploads, round):
        del round
        return difference(model, uploads.mean), {}

    return Algorithm(
        init=init,
        exchanges=(Exchange(lambda model, round: model, local, update),),
        models=lambda model: {"global": model},
    )


def quasi_gradient(
    rho: float | Schedule, alpha: float, normalised: bool
) -> optax.GradientTransformationExtraArgs:
    """(1 - alpha) g1 + alpha g(w + e)."""

    def update(grads, state, params, *, grad_fn, round=0, **extra: Any):
        del extra
        radius = jnp.asarray(rate_of(rho, round), jnp.float32)
        if normalised:
            radius = radius / (optax.tree.norm(grads) + EPSILON)
        there = grad_fn(combine(params, radius, grads))
        return jax.tree.map(lambda a, b: (1 - alpha) * a + alpha * b, grads, there), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


METHOD = Method(
    "fedspeed", "Sun 2023", "prox-correction, looks ahead",
    lambda p: fedspeed(p.client, rho=p.rho, weighting=p.weighting, **p.settings),
    settings={
        "alpha": Setting(0.95, "weight of the gradient that looks ahead", at_least=0, at_most=1),
        "prox": Setting(100.0, "the paper's lambda", above=0),
        "normalised": Setting(False, "ascent of length rho, as in the group's simulator"),
    },
    gradients=2, optimizer="own", sharpness="own",
)
