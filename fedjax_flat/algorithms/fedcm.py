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
from fedjax_flat.client.optimizer import Schedule, rate_of


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
    weigh = errors.lookup("weighting", weighting, WEIGHTINGS)
    if not 0 < alpha <= 1:
        raise errors.UsageError(f"alpha = {alpha}: expected more than 0 and at most 1.")

    def init(params, num_clients):
        del num_clients
        base = FedAvgState(params, server_optimizer.init(params))
        return FedCMState(base, zeros(params)), ()

    def local(message, state, data, round, key):
        x, direction = message
        params, info, _ = client.train(
            x, data, key, round=round, drift=drift.blended(alpha, direction)
        )
        steps = info.steps.astype(jnp.float32)
        return ClientResult(difference(x, params), weigh(data.size), state, info, total=steps)

    def update(server, uploads, round):
        base = server_step(server_optimizer, server.base, uploads.pseudo_gradient)
        steps = uploads.total / jnp.maximum(uploads.clients, 1)
        length = jnp.maximum(steps, 1) * rate_of(learning_rate, round)
        direction = jax.tree.map(lambda d: d / length, uploads.pseudo_gradient)
        return FedCMState(base, direction), {}

    return Algorithm(
        init=init,
        exchanges=(
            Exchange(lambda server, round: (server.base.params, server.direction), local, update),
        ),
        models=lambda server: {"global": server.base.params},
    )
