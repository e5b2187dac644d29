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
from fedjax_flat.algorithms.base import (
    WEIGHTINGS,
    Algorithm,
    ClientResult,
    Exchange,
    combine,
    difference,
    zeros,
)
from fedjax_flat.client import Client, drift
from fedjax_flat.client.optimizer import Schedule, rate_of
from fedjax_flat.client.sharpness import EPSILON


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
    weigh = errors.lookup("weighting", weighting, WEIGHTINGS)
    errors.positive("prox", prox)
    if not 0 <= alpha <= 1:
        raise errors.UsageError(f"alpha = {alpha}: expected 0 to 1.")

    def init(params, num_clients):
        del num_clients
        return params, zeros(params)

    def local(message, dual, data, round, key):
        params, info, _ = client.train(
            message,
            data,
            key,
            round=round,
            drift=drift.dynamic(dual, 1 / prox),
            sharpness=quasi_gradient(rho, alpha, normalised),
        )
        delta = difference(message, params)
        dual = combine(dual, 1 / prox, delta)
        corrected = combine(delta, prox, dual)  # x - (w_k - lambda h_k)
        return ClientResult(corrected, weigh(data.size), dual, info)

    def update(params, uploads, round):
        del round
        return difference(params, uploads.pseudo_gradient), {}

    return Algorithm(
        init=init,
        exchanges=(Exchange(lambda params, round: params, local, update),),
        models=lambda params: {"global": params},
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
