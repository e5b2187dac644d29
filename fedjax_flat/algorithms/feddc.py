"""FedDC: each client follows its drift, and the server takes it off again.

Gao et al., "FedDC: federated learning with non-IID data via local drift decoupling and correction"
(CVPR 2022). K_k is a client's number of local steps, N the number of clients.

    local step   v <- v - eta_l (grad f_k(v) + alpha (h_k + v - w) + (g_k - g) / (eta_l K_k))
    afterwards   h_k <- h_k + v_k - w,    g_k <- v_k - w
    server       w <- sum_k (n_k / n) (v_k + h_k),    g = mean of g_k over all N clients

`variant="released"` is the authors' code, with s_k = n_k N / (sum of all n):

    local step   v <- v - eta_l (grad f_k(v) + alpha / s_k (h_k + v - w) - c_k + c / s_k)
    afterwards   h_k as above,    c_k <- c_k - c / s_k + (w - v_k) / (eta_l K_k)
    server       w <- plain mean of the cohort's v_k + mean of h_k over all N clients
                 c <- c + 1 / N sum over the cohort of s_k (change of c_k)

The paper was not at hand: its form here is that of independent implementations which agree with
each other. Both forms pull in one direction; the released c_k is SCAFFOLD's, the paper's g_k holds
its own correction.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from fedjax_flat import errors
from fedjax_flat.algorithms.base import Algorithm, Exchange, combine, difference, replies, zeros
from fedjax_flat.algorithms.method import Method
from fedjax_flat.client import Client, drift
from fedjax_flat.client.optimizer import Schedule, rate_of
from fedjax_flat.models import Variables
from fedjax_flat.settings import Setting


class FedDCState(NamedTuple):
    """The global model, g (or c), the mean of all h_k (released) and N."""

    model: Variables
    correction: Any
    drift: Any
    num_clients: Any


class FedDCClient(NamedTuple):
    """h_k, and g_k (or c_k)."""

    drift: Any
    correction: Any


def feddc(
    client: Client,
    *,
    alpha: float,
    learning_rate: float | Schedule,
    variant: str = "paper",
    weighting: str = "examples",
) -> Algorithm:
    """FedDC for clients whose optimiser is SGD with `learning_rate`."""
    errors.at_least("alpha", alpha, 0)
    released = errors.lookup("variant", variant, {"paper": False, "released": True})
    reply = replies("uniform" if released else weighting)

    def init(variables, num_clients):
        zero = zeros(variables.params)
        kept = zero if released else ()
        server = FedDCState(variables, zero, kept, jnp.float32(num_clients))
        return server, FedDCClient(zero, zero)

    def local(message, own, data, round, key):
        w, g = message.model, message.correction
        share, scale = 1.0, rate_of(learning_rate, round) * jnp.maximum(client.steps(data), 1)
        if released:  # s_k, and corrections on the scale of gradients
            size = jnp.maximum(data.size, 1).astype(jnp.float32)
            share = size * message.num_clients / data.indices.shape[0]
            pull = combine(combine(zeros(g), 1 / share, g), -1.0, own.correction)
        else:
            pull = combine(zeros(g), 1 / scale, difference(own.correction, g))
        pull = combine(pull, alpha / share, own.drift)
        near = optax.chain(drift.proximal(alpha / share), drift.shifted(pull))
        trained, info, _ = client.train(w, data, key, round=round, drift=near)
        delta = difference(w, trained)
        h = difference(own.drift, delta.params)
        if released:
            change = combine(combine(zeros(g), 1 / scale, delta.params), -1 / share, g)
            new = combine(own.correction, 1.0, change)
            total = combine(zeros(g), share, change)
            return reply(data, FedDCClient(h, new), info, mean=delta, sum=(delta.params, total))
        new = combine(zeros(g), -1.0, delta.params)
        corrected = delta._replace(params=difference(delta.params, h))  # w - (v_k + h_k)
        change = difference(new, own.correction)
        return reply(data, FedDCClient(h, new), info, mean=corrected, sum=change)

    def update(server, uploads, round):
        del round
        model, n = difference(server.model, uploads.mean), server.num_clients
        if not released:
            correction = combine(server.correction, 1 / n, uploads.sum)
            return server._replace(model=model, correction=correction), {}
        moved, change = uploads.sum
        h = combine(server.drift, -1 / n, moved)
        model = model._replace(params=combine(model.params, 1.0, h))
        correction = combine(server.correction, 1 / n, change)
        return FedDCState(model, correction, h, n), {}

    message = lambda server, round: server._replace(drift=())
    return Algorithm(
        init=init,
        exchanges=(Exchange(message, local, update),),
        models=lambda server: {"global": server.model},
    )


METHOD = Method(
    "feddc", "Gao 2022", "drift is followed, then taken off",
    lambda p: feddc(
        p.client, learning_rate=p.learning_rate, weighting=p.weighting, **p.settings
    ),
    settings={
        "alpha": Setting(0.01, "strength of the pull to the global model", at_least=0),
        "variant": Setting("paper", "or as the released code", choices=("paper", "released")),
    },
    optimizer="own", client_optimizer="sgd",
)
