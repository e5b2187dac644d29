"""SCAFFOLD: control variates against client drift. With SAM on the clients it is FedGAMMA.

Karimireddy et al., "SCAFFOLD: stochastic controlled averaging for federated learning" (ICML 2020);
Dai et al., "FedGAMMA: federated learning with global sharpness-aware minimization" (2023).

    local step   w <- w - eta_l (g - c_k + c)
    afterwards   c_k+ = c_k - c + (x - w_k) / (steps eta_l)    (option II)
                 c_k+ = gradient of f_k at x                   (option I)
    server       x <- SERVEROPT(x, Delta),   c <- c + 1/K sum over the cohort of (c_k+ - c_k)

`steps` is the client's own number of local steps. Weight decay and momentum, which the paper does
not have, act outside the correction, and option II sees what they did to w_k.
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
    combine,
    difference,
    zeros,
)
from fedjax_flat.algorithms.fedavg import FedAvgState, server_step
from fedjax_flat.client import Client, drift
from fedjax_flat.client.optimizer import Schedule, rate_of


class ScaffoldState(NamedTuple):
    """The global model with the server optimiser's state, c and K."""

    base: FedAvgState
    control: Any
    num_clients: jax.Array


def scaffold(
    client: Client,
    server_optimizer: optax.GradientTransformation,
    *,
    learning_rate: float | Schedule,
    option: int = 2,
    weighting: str = "examples",
) -> Algorithm:
    """SCAFFOLD for clients whose optimiser is SGD with `learning_rate`."""
    weigh = errors.lookup("weighting", weighting, WEIGHTINGS)
    if option not in (1, 2):
        raise errors.UsageError(f"SCAFFOLD option {option}: expected 1 or 2.")

    def init(params, num_clients):
        base = FedAvgState(params, server_optimizer.init(params))
        return ScaffoldState(base, zeros(params), jnp.float32(num_clients)), zeros(params)

    def local(message, own, data, round, key):
        x, c = message
        corrected = drift.shifted(difference(c, own))
        params, info, _ = client.train(x, data, key, round=round, drift=corrected)
        delta = difference(x, params)
        if option == 1:
            new = client.gradient(x, data)
        else:
            steps = jnp.maximum(info.steps, 1).astype(jnp.float32)
            scale = 1 / (steps * rate_of(learning_rate, round))
            new = combine(difference(own, c), scale, delta)
        return ClientResult(delta, weigh(data.size), new, info, total=difference(new, own))

    def update(server, uploads, round):
        del round
        base = server_step(server_optimizer, server.base, uploads.pseudo_gradient)
        control = combine(server.control, 1 / server.num_clients, uploads.total)
        return server._replace(base=base, control=control), {}

    return Algorithm(
        init=init,
        exchanges=(
            Exchange(lambda server, round: (server.base.params, server.control), local, update),
        ),
        models=lambda server: {"global": server.base.params},
    )
