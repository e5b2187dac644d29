"""Mime and MimeLite: clients use the server's momentum, frozen during the round.

Karimireddy et al., "Breaking the centralized barrier for cross-device federated learning" (NeurIPS
2021).

    c            = weighted mean over the cohort of the gradients of f_k at x (all their examples)
    local step   w <- w - eta_l ((1 - beta) d + beta m)
                 Mime: d = g(w) - g(x) + c, both g on one batch;   MimeLite: d = g(w)
    server       m <- (1 - beta) c + beta m,   x <- SERVEROPT(x, Delta)

Mime asks the cohort for c before it trains: two exchanges in a round. MimeLite sends the gradient
with the model. beta = 0 is the papers' "SGD", beta = 0.9 "SGDm"; MimeLite with beta = 0 is FedAvg.
"""

from typing import Any, NamedTuple

import jax
import optax

from fedjax_flat import errors
from fedjax_flat.algorithms.base import (
    WEIGHTINGS,
    Algorithm,
    ClientResult,
    Exchange,
    difference,
    zeros,
)
from fedjax_flat.algorithms.fedavg import FedAvgState, server_step
from fedjax_flat.client import Client, drift
from fedjax_flat.client.local import no_training
from fedjax_flat.server import aggregate


class MimeState(NamedTuple):
    """The global model with the server optimiser's state, m, and this round's c."""

    base: FedAvgState
    momentum: Any
    gradient: Any


def mime(
    client: Client,
    server_optimizer: optax.GradientTransformation,
    *,
    momentum: float,
    lite: bool = False,
    weighting: str = "examples",
) -> Algorithm:
    """Mime with momentum beta = `momentum`; `lite` leaves the variance reduction out."""
    weigh = errors.lookup("weighting", weighting, WEIGHTINGS)
    errors.below_one("momentum", momentum)

    def init(params, num_clients):
        del num_clients
        zero = zeros(params)
        return MimeState(FedAvgState(params, server_optimizer.init(params)), zero, zero), ()

    def measure(x, state, data, round, key):
        del round, key
        return ClientResult(client.gradient(x, data), weigh(data.size), state, no_training())

    def remember(server, uploads, round):
        del round
        return server._replace(gradient=uploads.pseudo_gradient), {}

    def local(message, state, data, round, key):
        x, m, c = message
        blend = drift.blended(1 - momentum, m)
        direction = blend if lite else optax.chain(drift.variance_reduced(c), blend)
        params, info, _ = client.train(x, data, key, round=round, drift=direction)
        weight = weigh(data.size)
        total = (aggregate.weighted(client.gradient(x, data), weight), weight) if lite else ()
        return ClientResult(difference(x, params), weight, state, info, total=total)

    def update(server, uploads, round):
        del round
        c = aggregate.mean(*uploads.total) if lite else server.gradient
        m = jax.tree.map(lambda m, c: (1 - momentum) * c + momentum * m, server.momentum, c)
        base = server_step(server_optimizer, server.base, uploads.pseudo_gradient)
        return MimeState(base, m, c), {}

    def message(server, round):
        del round
        return server.base.params, server.momentum, () if lite else server.gradient

    ask = Exchange(lambda server, round: server.base.params, measure, remember)
    train = Exchange(message, local, update)
    return Algorithm(
        init=init,
        exchanges=(train,) if lite else (ask, train),
        models=lambda server: {"global": server.base.params},
    )

