"""FedNova: clients that take more steps do not pull harder.

Wang et al., "Tackling the objective inconsistency problem in heterogeneous federated optimization"
(NeurIPS 2020). A client of tau_k local steps ends at w - eta sum_i a_i g_i, where a_i is how far
gradient i has been carried by momentum rho, and drawn back by a proximal term of strength mu:

    ||a_k||_1    = x after tau_k times   v <- rho v + 1 - eta mu x,   x <- x + v,    from 0
                 = tau_k for plain SGD
    d_k          = (w - w_k) / ||a_k||_1
    server       w <- SERVEROPT(w, tau_eff sum_k p_k d_k),   p_k = n_k / (examples of the cohort)
                 tau_eff = sum_k p_k tau_k;  `effective="norm"`: sum_k p_k ||a_k||_1

The proximal term is part of the gradient that momentum carries. With equal numbers of steps of
plain SGD it is FedAvg; so it is with `norm` for momentum and proximal terms. Statistics are
averaged as they are.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_flat import errors
from fedjax_flat.algorithms.base import Algorithm, Exchange, difference, replies
from fedjax_flat.algorithms.fedavg import server_start, server_step
from fedjax_flat.algorithms.method import Method
from fedjax_flat.client import Client, drift
from fedjax_flat.client.optimizer import Schedule, rate_of
from fedjax_flat.settings import Setting


def fednova(
    client: Client,
    server_optimizer: optax.GradientTransformation,
    *,
    learning_rate: float | Schedule,
    momentum: float = 0.0,
    mu: float = 0.0,
    effective: str = "steps",
    weighting: str = "examples",
) -> Algorithm:
    """FedNova of clients whose optimiser is SGD with this rate and momentum."""
    reply = replies(weighting)
    errors.at_least("mu", mu, 0)
    errors.below_one("momentum", momentum)
    by_norm = errors.lookup("effective", effective, {"steps": False, "norm": True})

    def init(variables, num_clients):
        del num_clients
        return server_start(server_optimizer, variables), ()

    def local(message, state, data, round, key):
        near = drift.proximal(mu) if mu else None
        trained, info, _ = client.train(message, data, key, round=round, drift=near)
        steps = client.steps(data)
        norm = accumulation(steps, momentum, mu * rate_of(learning_rate, round))
        delta = difference(message, trained)
        d = jax.tree.map(lambda x: x / jnp.maximum(norm, 1e-6).astype(x.dtype), delta.params)
        return reply(data, state, info, mean=(delta._replace(params=d), norm if by_norm else steps))

    def update(server, uploads, round):
        del round
        d, effect = uploads.mean
        delta = jax.tree.map(lambda x: effect.astype(x.dtype) * x, d.params)
        return server_step(server_optimizer, server, d._replace(params=delta)), {}

    return Algorithm(
        init=init,
        exchanges=(Exchange(lambda server, round: server.model, local, update),),
        models=lambda server: {"global": server.model},
    )


def accumulation(steps: jax.Array, momentum: float, pull: Any) -> jax.Array:
    """||a||_1 of so many steps; `pull` is eta mu."""

    def step(i, carry):
        del i
        x, v = carry
        v = momentum * v + 1 - pull * x
        return x + v, v

    zero = jnp.zeros((), jnp.float32)
    return jax.lax.fori_loop(0, steps.astype(jnp.int32), step, (zero, zero))[0]


METHOD = Method(
    "fednova", "Wang 2020", "updates normalised by local work",
    lambda p: fednova(
        p.client, p.server_optimizer, learning_rate=p.learning_rate,
        momentum=p.config.client.momentum, weighting=p.weighting, **p.settings,
    ),
    settings={
        "mu": Setting(0.0, "strength of a proximal term", at_least=0),
        "effective": Setting(
            "steps", "what the server's step is as long as", choices=("steps", "norm")
        ),
    },
    client_optimizer="sgd",
)
