"""FedACG: the server sends a look-ahead model and clients stay near it.

Kim et al., "Communication-efficient federated learning with accelerated client gradient" (CVPR
2024).

    message      x~ = x + lambda m
    local        w_k from x~ on f_k + beta / 2 ||w - x~||^2
    server       m <- lambda m - mean of (x~ - w_k),   x <- x + m
"""

from typing import Any, NamedTuple

import jax

from fedjax_flat import errors
from fedjax_flat.algorithms.base import Algorithm, Exchange, combine, difference, replies, zeros
from fedjax_flat.algorithms.method import Method
from fedjax_flat.client import Client, drift
from fedjax_flat.models import Variables
from fedjax_flat.settings import Setting


class FedACGState(NamedTuple):
    """The global model and its momentum."""

    model: Variables
    momentum: Any


def fedacg(
    client: Client, *, momentum: float, beta: float, weighting: str = "examples"
) -> Algorithm:
    """FedACG; `momentum` is the paper's lambda."""
    reply = replies(weighting)
    errors.below_one("momentum", momentum)
    errors.at_least("beta", beta, 0)

    def init(variables, num_clients):
        del num_clients
        return FedACGState(variables, zeros(variables.params)), ()

    def local(message, state, data, round, key):
        trained, info, _ = client.train(
            message, data, key, round=round, drift=drift.proximal(beta)
        )
        return reply(data, state, info, mean=difference(message, trained))

    def update(server, uploads, round):
        del round
        params, stats = server.model
        m = jax.tree.map(lambda m, d: momentum * m - d, server.momentum, uploads.mean.params)
        model = Variables(combine(params, 1.0, m), difference(stats, uploads.mean.stats))
        return FedACGState(model, m), {}

    def look_ahead(server, round):
        del round
        ahead = combine(server.model.params, momentum, server.momentum)
        return server.model._replace(params=ahead)

    return Algorithm(
        init=init,
        exchanges=(Exchange(look_ahead, local, update),),
        models=lambda server: {"global": server.model},
    )


METHOD = Method(
    "fedacg", "Kim 2024", "a look-ahead model, and clients near it",
    lambda p: fedacg(p.client, weighting=p.weighting, **p.settings), optimizer="own",
    settings={
        "momentum": Setting(0.85, "the paper's lambda", at_least=0, below=1),
        "beta": Setting(0.01, "strength of the proximal term", at_least=0),
    },
)
