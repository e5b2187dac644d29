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
from fedjax_flat.algorithms.base import Algorithm, Exchange, combine, difference, replies, zeros
from fedjax_flat.algorithms.method import Method
from fedjax_flat.client import Client, drift
from fedjax_flat.models import Variables
from fedjax_flat.settings import Setting


class FedDynState(NamedTuple):
    """The cloud model x, the mean of the last cohort's models if reported, h and K."""

    model: Variables
    mean: Any
    dual: Any
    num_clients: jax.Array


def feddyn(
    client: Client, *, alpha: float, weighting: str = "examples", average_model: bool = False
) -> Algorithm:
    """FedDyn; `average_model` reports the mean of the active models beside the cloud model."""
    reply = replies(weighting)
    errors.positive("alpha", alpha)

    def init(variables, num_clients):
        mean, zero = variables if average_model else (), zeros(variables.params)
        return FedDynState(variables, mean, zero, jnp.float32(num_clients)), zero

    def local(message, dual, data, round, key):
        trained, info, _ = client.train(
            message, data, key, round=round, drift=drift.dynamic(dual, alpha)
        )
        delta = difference(message, trained)
        dual = combine(dual, alpha, delta.params)
        return reply(data, dual, info, mean=delta, sum=delta.params)

    def update(server, uploads, round):
        del round
        dual = combine(server.dual, alpha / server.num_clients, uploads.sum)
        mean = difference(server.model, uploads.mean)
        model = mean._replace(params=combine(mean.params, -1 / alpha, dual))
        kept = mean if average_model else ()
        return FedDynState(model, kept, dual, server.num_clients), {}

    def models(server):
        return {"global": server.model} | ({"average": server.mean} if average_model else {})

    return Algorithm(
        init=init,
        exchanges=(Exchange(lambda server, round: server.model, local, update),),
        models=models,
    )


METHOD = Method(
    "feddyn", "Acar 2021", "dynamic regularisation, a dual each",
    lambda p: feddyn(p.client, weighting=p.weighting, **p.settings), optimizer="own",
    settings={
        "alpha": Setting(0.01, "strength of the regulariser", above=0),
        "average_model": Setting(False, "report the mean of the active clients' models too"),
    },
)
