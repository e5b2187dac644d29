"""AdaBest: FedDyn's idea with estimates that forget, and without the number of clients.

Varno et al., "AdaBest: minimizing client drift in federated learning via adaptive bias estimation"
(ECCV 2022).

    local step   w <- w - eta_l (g - h_k)
    afterwards   h_k <- h_k / (t - t_k) + mu (x - w_k),    t_k the round of its last participation
    server       wbar = mean of w_k,   h = beta (wbar of the round before - wbar),   x <- wbar - h

The mean is weighted as `algorithm.weighting` says. Where the authors' simulator differs, `variant`:
    "paper"      the lines above
    "released"   the mean is unweighted; a client of n_k examples takes mu n / n_k for mu at each
                 step, n the mean size of all clients that took part in the rounds before

With clients of one size both are the same.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat import errors
from fedjax_flat.algorithms.base import Algorithm, Exchange, combine, difference, replies, zeros
from fedjax_flat.algorithms.method import Method
from fedjax_flat.client import Client, drift
from fedjax_flat.models import Variables
from fedjax_flat.settings import Setting


class AdaBestState(NamedTuple):
    """The model that is sent and the mean of the last cohort's."""

    model: Variables
    mean: Variables
    seen: Any  # as released: [examples, clients] that took part; else ()


class AdaBestClient(NamedTuple):
    """h_k and the round of the last participation."""

    bias: Any
    last: jax.Array


def adabest(
    client: Client,
    *,
    mu: float,
    beta: float,
    variant: str = "paper",
    weighting: str = "examples",
) -> Algorithm:
    """AdaBest."""
    released = errors.lookup("variant", variant, {"paper": False, "released": True})
    reply = replies("uniform" if released else weighting)
    errors.at_least("mu", mu, 0)
    errors.below_one("beta", beta)

    def init(variables, num_clients):
        del num_clients
        own = AdaBestClient(zeros(variables.params), jnp.int32(-1))
        seen = jnp.zeros(2, jnp.float32) if released else ()
        return AdaBestState(variables, variables, seen), own

    def broadcast(server, round):
        del round
        mean_size = server.seen[0] / jnp.maximum(server.seen[1], 1) if released else ()
        return server.model, mean_size

    def local(message, own, data, round, key):
        x, mean_size = message
        size = jnp.asarray(data.size, jnp.float32)
        # As released, mu is not in h_k but beside it.
        inside, beside = (1.0, mu * mean_size / jnp.maximum(size, 1)) if released else (mu, 1.0)
        away = drift.shifted(jax.tree.map(lambda h: -beside * h, own.bias))
        trained, info, _ = client.train(x, data, key, round=round, drift=away)
        delta = difference(x, trained)
        age = (round - own.last).astype(jnp.float32)
        bias = jax.tree.map(lambda h, d: h / age + inside * d, own.bias, delta.params)
        state = AdaBestClient(bias, jnp.asarray(round, jnp.int32))
        return reply(data, state, info, mean=delta, sum=size if released else ())

    def update(server, uploads, round):
        del round
        mean = difference(server.model, uploads.mean)
        ahead = combine(mean.params, -beta, difference(server.mean.params, mean.params))
        seen = server.seen + jnp.stack([uploads.sum, uploads.clients]) if released else ()
        return AdaBestState(mean._replace(params=ahead), mean, seen), {}

    return Algorithm(
        init=init,
        exchanges=(Exchange(broadcast, local, update),),
        models=lambda server: {"global": server.model},
    )


METHOD = Method(
    "adabest", "Varno 2022", "bias estimates that forget",
    lambda p: adabest(p.client, weighting=p.weighting, **p.settings), optimizer="own",
    settings={
        "mu": Setting(0.02, "weight of the client's own estimate", at_least=0),
        "beta": Setting(0.9, "how far the server goes on", at_least=0, below=1),
        "variant": Setting("paper", "or as the released code", choices=("paper", "released")),
    },
)
