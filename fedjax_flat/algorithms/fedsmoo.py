"""FedSMOO: duals on the models, as in FedDyn, and on the perturbations of SAM.

Sun et al., "Dynamic regularized sharpness aware minimization in federated learning: approaching
global consistency and smooth landscape" (ICML 2023).

    local step   q = g1 - mu_k - s,   e = rho q / ||q||,   mu_k <- mu_k + e - s
                 w <- w - eta_l (g(w + e) - h_k + (w - x) / beta)
    afterwards   h_k <- h_k - (w_k - x) / beta;   upload w_k and mu_k
    server       h <- h - 1 / (beta K) sum of (w_k - x),   x <- mean of w_k - beta h
                 s = rho S / ||S||,   S = mean of the uploaded mu_k

As in the group's simulator, S leaves out the last perturbation, which the paper subtracts.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_flat import errors
from fedjax_flat.algorithms.base import Algorithm, Exchange, combine, difference, replies, zeros
from fedjax_flat.algorithms.method import Method
from fedjax_flat.client import Client, drift
from fedjax_flat.client.optimizer import Schedule, rate_of
from fedjax_flat.client.sharpness import scaled_to
from fedjax_flat.models import Variables
from fedjax_flat.settings import Setting


class FedSMOOState(NamedTuple):
    """The global model, h, s and K."""

    model: Variables
    dual: Any
    perturbation: Any
    num_clients: jax.Array


class FedSMOOClient(NamedTuple):
    """h_k and mu_k."""

    dual: Any
    perturbation_dual: Any


def fedsmoo(
    client: Client, *, rho: float | Schedule, beta: float, weighting: str = "examples"
) -> Algorithm:
    """FedSMOO."""
    reply = replies(weighting)
    errors.positive("beta", beta)

    def init(variables, num_clients):
        zero = zeros(variables.params)
        server = FedSMOOState(variables, zero, zero, jnp.float32(num_clients))
        return server, FedSMOOClient(zero, zero)

    def local(message, own, data, round, key):
        x, s = message
        trained, info, mu = client.train(
            x,
            data,
            key,
            round=round,
            drift=drift.dynamic(own.dual, 1 / beta),
            sharpness=consistent_ascent(rho, own.perturbation_dual, s),
        )
        delta = difference(x, trained)
        state = FedSMOOClient(combine(own.dual, 1 / beta, delta.params), mu)
        return reply(data, state, info, mean=delta, sum=(delta.params, mu))

    def update(server, uploads, round):
        delta_sum, mu_sum = uploads.sum
        dual = combine(server.dual, 1 / (beta * server.num_clients), delta_sum)
        mean = difference(server.model, uploads.mean)
        s = scaled_to(rate_of(rho, round), mu_sum)  # S and the sum have one direction
        model = mean._replace(params=combine(mean.params, -beta, dual))
        return FedSMOOState(model, dual, s, server.num_clients), {}

    return Algorithm(
        init=init,
        exchanges=(
            Exchange(lambda server, round: (server.model, server.perturbation), local, update),
        ),
        models=lambda server: {"global": server.model},
    )


def consistent_ascent(
    rho: float | Schedule, mu: Any, s: Any
) -> optax.GradientTransformationExtraArgs:
    """The gradient at w + rho q / ||q||; its state is mu_k, from `mu` on."""

    def update(grads, state, params, *, grad_fn, round=0, **extra: Any):
        del extra
        q = jax.tree.map(lambda g, m, s: g - m - s, grads, state, s)
        e = scaled_to(rate_of(rho, round), q)
        state = jax.tree.map(lambda m, e, s: m + e - s, state, e, s)
        return grad_fn(combine(params, 1.0, e)), state

    return optax.GradientTransformationExtraArgs(lambda params: mu, update)



METHOD = Method(
    "fedsmoo", "Sun 2023", "duals on models and on perturbations",
    lambda p: fedsmoo(p.client, rho=p.rho, weighting=p.weighting, **p.settings),
    settings={"beta": Setting(10.0, "strength of the duals' constraint", above=0)},
    gradients=2, optimizer="own", sharpness="own",
)
