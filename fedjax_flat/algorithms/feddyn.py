"""FedDyn: a dynamic regulariser aligns the clients' stationary points with the global one.

Acar et al., "Federated learning based on dynamic regularization" (ICLR 2021).

    local step   w <- w - eta_l (g - h_k + alpha (w - x))
    afterwards   h_k <- h_k - alpha (w_k - x)
    server       h <- h - alpha / K sum over the cohort of (w_k - x)
                 x <- mean of w_k - h / alpha

Here h is the dual of FedGloSS's notation too, with beta = 1 / alpha. Besides the cloud model x, the
released code reports the mean of the active clients' models: `models` has it as `average` if asked.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

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


class FedDynState(NamedTuple):
    """The cloud model x, the mean of the last cohort's models if reported, h and K."""

    params: Any
    mean: Any
    dual: Any
    num_clients: jax.Array


def feddyn(
    client: Client, *, alpha: float, weighting: str = "examples", average_model: bool = False
) -> Algorithm:
    """FedDyn; `average_model` reports the mean of the active models beside the cloud model."""
    weigh = errors.lookup("weighting", weighting, WEIGHTINGS)
    errors.positive("alpha", alpha)

    def init(params, num_clients):
        mean = params if average_model else ()
        return FedDynState(params, mean, zeros(params), jnp.float32(num_clients)), zeros(params)

    def local(message, dual, data, round, key):
        params, info, _ = client.train(
            message, data, key, round=round, drift=drift.dynamic(dual, alpha)
        )
        delta = difference(message, params)
        dual = combine(dual, alpha, delta)
        return ClientResult(delta, weigh(data.size), dual, info)

    def update(server, uploads, round):
        del round
        dual = combine(server.dual, alpha / server.num_clients, uploads.delta_sum)
        mean = difference(server.params, uploads.pseudo_gradient)
        params = combine(mean, -1 / alpha, dual)
        kept = mean if average_model else ()
        return FedDynState(params, kept, dual, server.num_clients), {}

    def models(server):
        return {"global": server.params} | ({"average": server.mean} if average_model else {})

    return Algorithm(
        init=init,
        exchanges=(Exchange(lambda server, round: server.params, local, update),),
        models=models,
    )
