"""FedCM: the last round's direction enters every local step. With SAM on clients it is MoFedSAM.

Xu et al., "FedCM: federated learning with client-level momentum" (2021); Qu et al., "Generalized
federated learning via sharpness aware minimization" (ICML 2022).

    local step   w <- w - eta_l (alpha g + (1 - alpha) D)
    server       D = Delta / (eta_l * mean number of local steps),   x <- SERVEROPT(x, Delta)

D is the last pseudo-gradient on the scale of a gradient. The papers give every client the same
number of steps; with unequal clients the mean over the cohort is taken.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_flat import errors
from fedjax_flat.algorithms.base import Algorithm, Exchange, difference, replies, zeros
from fedjax_flat.algorithms.fedavg import FedAvgState, server_start, server_step
from fedjax_flat.algorithms.method import Method, Parts
from fedjax_flat.client import Client, drift
from fedjax_flat.client.optimizer import Schedule, rate_of
from fedjax_flat.settings import Setting


class FedCMState(NamedTuple):
    """The global model with the server optimiser's state, and D."""

    base: FedAvgState
    direction: Any


def fedcm(
    client: Client,
    server_optimizer: optax.GradientTransformation,
    *,
    learning_rate: float | Schedule,
    alpha: float,
    weighting: str = "examples",
) -> Algorithm:
    """FedCM for clients whose optimiser is SGD with `learning_rate`."""
    reply = replies(weighting)
    if not 0 < alpha <= 1:
        raise errors.UsageError(f"alpha = {alpha}: expected more than 0 and at most 1.")

    def init(variables, num_clients):
        del num_clients
        base = server_start(server_optimizer, variables)
        return FedCMState(base, zeros(variables.params)), ()

    def local(message, state, data, round, key):
        x, direction = message
        trained, info, _ = client.train(
            x, data, key, round=round, drift=drift.blended(alpha, direction)
        )
        steps = info.steps.astype(jnp.float32)
        return reply(data, state, info, mean=difference(x, trained), sum=steps)

    def update(server, uploads, round):
        base = server_step(server_optimizer, server.base, uploads.mean)
        steps = uploads.sum / jnp.maximum(uploads.clients, 1)
        length = jnp.maximum(steps, 1) * rate_of(learning_rate, round)
        direction = jax.tree.map(lambda d: d / length, uploads.mean.params)
        return FedCMState(base, direction), {}

    return Algorithm(
        init=init,
        exchanges=(
            Exchange(lambda server, round: (server.base.model, server.direction), local, update),
        ),
        models=lambda server: {"global": server.base.model},
    )


def _make(parts: Parts) -> Algorithm:
    return fedcm(
        parts.client, parts.server_optimizer, learning_rate=parts.learning_rate,
        weighting=parts.weighting, **parts.settings,
    )


_SETTINGS = {"alpha": Setting(0.1, "weight of the local gradient", above=0, at_most=1)}
METHOD = (
    Method(
        "fedcm", "Xu 2021", "the last direction in every local step", _make, _SETTINGS,
        client_optimizer="sgd",
    ),
    Method(
        "mofedsam", "Qu 2022", "FedCM with SAM", _make, _SETTINGS, "fedcm", sharpness="sam",
        client_optimizer="sgd",
    ),
)
