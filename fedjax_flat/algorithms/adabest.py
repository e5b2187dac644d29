"""AdaBest: FedDyn's idea with estimates that forget, and without the number of clients.

Varno et al., "AdaBest: minimizing client drift in federated learning via adaptive bias estimation"
(ECCV 2022).

    local step   w <- w - eta_l (g - h_k)
    afterwards   h_k <- h_k / (t - t_k) + mu (x - w_k),    t_k the round of its last participation
    server       wbar = mean of w_k,   h = beta (wbar of the round before - wbar),   x <- wbar - h
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


class AdaBestState(NamedTuple):
    """The model that is sent and the mean of the last cohort's."""

    params: Any
    mean: Any


class AdaBestClient(NamedTuple):
    """h_k and the round of the last participation."""

    bias: Any
    last: jax.Array


def adabest(
    client: Client, *, mu: float, beta: float, weighting: str = "examples"
) -> Algorithm:
    """AdaBest."""
    weigh = errors.lookup("weighting", weighting, WEIGHTINGS)
    errors.at_least("mu", mu, 0)
    errors.below_one("beta", beta)

    def init(params, num_clients):
        del num_clients
        return AdaBestState(params, params), AdaBestClient(zeros(params), jnp.int32(-1))

    def local(message, own, data, round, key):
        away = drift.shifted(jax.tree.map(jnp.negative, own.bias))
        params, info, _ = client.train(message, data, key, round=round, drift=away)
        delta = difference(message, params)
        age = (round - own.last).astype(jnp.float32)
        bias = jax.tree.map(lambda h, d: h / age + mu * d, own.bias, delta)
        state = AdaBestClient(bias, jnp.asarray(round, jnp.int32))
        return ClientResult(delta, weigh(data.size), state, info)

    def update(server, uploads, round):
        del round
        mean = difference(server.params, uploads.pseudo_gradient)
        params = combine(mean, -beta, difference(server.mean, mean))
        return AdaBestState(params, mean), {}

    return Algorithm(
        init=init,
        exchanges=(Exchange(lambda server, round: server.params, local, update),),
        models=lambda server: {"global": server.params},
    )
