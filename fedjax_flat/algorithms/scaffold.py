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
from fedjax_flat.algorithms.base import Algorithm, Exchange, combine, difference, replies, zeros
from fedjax_flat.algorithms.fedavg import FedAvgState, server_start, server_step
from fedjax_flat.algorithms.method import Method, Parts
from fedjax_flat.client import Client, drift, full_gradient
from fedjax_flat.client.optimizer import Schedule, rate_of
from fedjax_flat.settings import Setting


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
    reply = replies(weighting)
    if option not in (1, 2):
        raise errors.UsageError(f"SCAFFOLD option {option}: expected 1 or 2.")

    def init(variables, num_clients):
        base, zero = server_start(server_optimizer, variables), zeros(variables.params)
        return ScaffoldState(base, zero, jnp.float32(num_clients)), zero

    def local(message, own, data, round, key):
        x, c = message
        corrected = drift.shifted(difference(c, own))
        trained, info, _ = client.train(x, data, key, round=round, drift=corrected)
        delta = difference(x, trained)
        if option == 1:
            new, _ = full_gradient(client, x, data)
        else:
            steps = jnp.maximum(info.steps, 1).astype(jnp.float32)
            scale = 1 / (steps * rate_of(learning_rate, round))
            new = combine(difference(own, c), scale, delta.params)
        return reply(data, new, info, mean=delta, sum=difference(new, own))

    def update(server, uploads, round):
        del round
        base = server_step(server_optimizer, server.base, uploads.mean)
        control = combine(server.control, 1 / server.num_clients, uploads.sum)
        return server._replace(base=base, control=control), {}

    return Algorithm(
        init=init,
        exchanges=(
            Exchange(lambda server, round: (server.base.model, server.control), local, update),
        ),
        models=lambda server: {"global": server.base.model},
    )


def _make(parts: Parts) -> Algorithm:
    return scaffold(
        parts.client, parts.server_optimizer, learning_rate=parts.learning_rate,
        weighting=parts.weighting, **parts.settings,
    )


_SETTINGS = {"option": Setting(2, "how control variates are renewed", choices=(1, 2))}
METHOD = (
    Method(
        "scaffold", "Karimireddy 2020", "control variates against drift", _make, _SETTINGS,
        client_optimizer="sgd",
    ),
    Method(
        "fedgamma", "Dai 2023", "SCAFFOLD with SAM", _make, _SETTINGS, "scaffold", sharpness="sam",
        client_optimizer="sgd",
    ),
)
