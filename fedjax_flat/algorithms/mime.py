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
from fedjax_flat.algorithms.base import Algorithm, Exchange, difference, replies, zeros
from fedjax_flat.algorithms.fedavg import FedAvgState, server_start, server_step
from fedjax_flat.algorithms.method import Method, Parts
from fedjax_flat.client import Client, drift, full_gradient
from fedjax_flat.settings import Setting


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
    reply = replies(weighting)
    errors.below_one("momentum", momentum)

    def init(variables, num_clients):
        del num_clients
        zero = zeros(variables.params)
        return MimeState(server_start(server_optimizer, variables), zero, zero), ()

    def measure(x, state, data, round, key):
        del round, key
        gradient, info = full_gradient(client, x, data)
        return reply(data, state, info, mean=gradient)

    def remember(server, uploads, round):
        del round
        return server._replace(gradient=uploads.mean), {}

    def local(message, state, data, round, key):
        x, m, c = message
        blend = drift.blended(1 - momentum, m)
        direction = blend if lite else optax.chain(drift.variance_reduced(c), blend)
        trained, info, _ = client.train(x, data, key, round=round, drift=direction)
        gradient = full_gradient(client, x, data)[0] if lite else ()
        return reply(data, state, info, mean=(difference(x, trained), gradient))

    def update(server, uploads, round):
        del round
        delta, gradient = uploads.mean
        c = gradient if lite else server.gradient
        m = jax.tree.map(lambda m, c: (1 - momentum) * c + momentum * m, server.momentum, c)
        base = server_step(server_optimizer, server.base, delta)
        return MimeState(base, m, c), {}

    def message(server, round):
        del round
        return server.base.model, server.momentum, () if lite else server.gradient

    ask = Exchange(lambda server, round: server.base.model, measure, remember)
    train = Exchange(message, local, update)
    return Algorithm(
        init=init,
        exchanges=(train,) if lite else (ask, train),
        models=lambda server: {"global": server.base.model},
    )


def _make(parts: Parts, lite: bool) -> Algorithm:
    return mime(
        parts.client, parts.server_optimizer, lite=lite, weighting=parts.weighting,
        **parts.settings,
    )


_SETTINGS = {"momentum": Setting(0.9, "beta; 0 is the papers' SGD", at_least=0, below=1)}
METHOD = (
    Method(
        "mime", "Karimireddy 2021", "MimeLite with variance reduction",
        lambda p: _make(p, lite=False), _SETTINGS, gradients=2,
    ),
    Method(
        "mimelite", "Karimireddy 2021", "the server's momentum on clients",
        lambda p: _make(p, lite=True), _SETTINGS, "mime",
    ),
)
