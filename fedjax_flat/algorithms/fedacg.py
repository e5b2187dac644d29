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


class FedACGState(NamedTuple):
    """The global model and its momentum."""

    params: Any
    momentum: Any


def fedacg(
    client: Client, *, momentum: float, beta: float, weighting: str = "examples"
) -> Algorithm:
    """FedACG; `momentum` is the paper's lambda."""
    weigh = errors.lookup("weighting", weighting, WEIGHTINGS)
    errors.below_one("momentum", momentum)
    errors.at_least("beta", beta, 0)

    def init(params, num_clients):
        del num_clients
        return FedACGState(params, zeros(params)), ()

    def local(message, state, data, round, key):
        params, info, _ = client.train(
            message, data, key, round=round, drift=drift.proximal(beta)
        )
        return ClientResult(difference(message, params), weigh(data.size), state, info)

    def update(server, uploads, round):
        del round
        m = jax.tree.map(
            lambda m, d: momentum * m - d, server.momentum, uploads.pseudo_gradient
        )
        return FedACGState(combine(server.params, 1.0, m), m), {}

    look_ahead = lambda server, round: combine(server.params, momentum, server.momentum)
    return Algorithm(
        init=init,
        exchanges=(Exchange(look_ahead, local, update),),
        models=lambda server: {"global": server.params},
    )
