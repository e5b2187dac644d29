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
from fedjax_flat.algorithms.base import Algorithm, Exchange, combine, difference, replies, zeros
from fedjax_flat.algorithms.method import Method
from fedjax_flat.client import Client, drift
from fedjax_flat.models import Variables
from fedjax_flat.settings import Setting


class AdaBestState(NamedTuple):
    """The model that is sent and the mean of the last cohort's."""

    model: Variables
    mean: Variables


class AdaBestClient(NamedTuple):
    """h_k and the round of the last participation."""

    bias: Any
    last: jax.Array


def adabest(
    client: Client, *, mu: float, beta: float, weighting: str = "examples"
) -> Algorithm:
    """AdaBest."""
    reply = replies(weighting)
    errors.at_least("mu", mu, 0)
    errors.below_one("beta", beta)

    def init(variables, num_clients):
        del num_clients
        own = AdaBestClient(zeros(variables.params), jnp.int32(-1))
        return AdaBestState(variables, variables), own

    def local(message, own, data, round, key):
        away = drift.shifted(jax.tree.map(jnp.negative, own.bias))
        trained, info, _ = client.train(message, data, key, round=round, drift=away)
        delta = difference(message, trained)
        age = (round - own.last).astype(jnp.float32)
        bias = jax.tree.map(lambda h, d: h / age + mu * d, own.bias, delta.params)
        state = AdaBestClient(bias, jnp.asarray(round, jnp.int32))
        return reply(data, state, info, mean=delta)

    def update(server, uploads, round):
        del round
        mean = difference(server.model, uploads.mean)
        ahead = combine(mean.params, -beta, difference(server.mean.params, mean.params))
        return AdaBestState(mean._replace(params=ahead), mean), {}

    return Algorithm(
        init=init,
        exchanges=(Exchange(lambda server, round: server.model, local, update),),
        models=lambda server: {"global": server.model},
    )


METHOD = Method(
    "adabest", "Varno 2022", "bias estimates that forget",
    lambda p: adabest(p.client, weighting=p.weighting, **p.settings), optimizer="own",
    settings={
        "mu": Setting(0.02, "weight of the client's own estimate", at_least=0),
        "beta": Setting(0.9, "how far the server goes on", at_least=0, below=1),
    },
)
