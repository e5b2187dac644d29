"""GMA, gradient masked averaging: coordinates about which clients agree move all the way.

Tenison et al., "Gradient masked averaging for federated learning" (TMLR 2023). d_k = w - w_k is the
update of client k, of m that took part.

    A     = |1 / m sum_k sign(d_k)|                          (agreement, coordinate by coordinate)
    mask  = 1 where A >= threshold, else A
    w     <- SERVEROPT(w, mask * sum_k (n_k / n) d_k)

Clients count alike in A, sign(0) = 0. With threshold 0 it is FedAvg. The metric `agreement` is the
share of coordinates that move all the way.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_flat import errors
from fedjax_flat.algorithms.base import Algorithm
from fedjax_flat.algorithms.fedavg import fedavg, server_step
from fedjax_flat.algorithms.method import Method
from fedjax_flat.client import Client
from fedjax_flat.models import num_parameters
from fedjax_flat.server import aggregate
from fedjax_flat.settings import Setting


def gma(
    client: Client,
    server_optimizer: optax.GradientTransformation,
    *,
    threshold: float = 0.4,
    weighting: str = "examples",
) -> Algorithm:
    """FedAvg with masked updates; clients train as they do there."""
    if not 0 <= threshold <= 1:
        raise errors.UsageError(f"threshold = {threshold}: expected 0 to 1.")
    base = fedavg(client, server_optimizer, weighting=weighting)
    (exchange,) = base.exchanges

    def local(message, state, data, round, key):
        reply = exchange.local(message, state, data, round, key)
        stats = reply.mean._replace(params=())
        return reply._replace(mean=stats, each=reply.mean.params)

    def update(server, uploads, round):
        del round
        mean = aggregate.mean_of(uploads.each, uploads.weights)
        masks = jax.tree.map(lambda d: mask(d, uploads.clients, threshold), uploads.each)
        params = jax.tree.map(lambda m, d: m * d, masks, mean)
        full = sum(jnp.sum((m == 1).astype(jnp.float32)) for m in jax.tree.leaves(masks))
        metrics = {"agreement": full / num_parameters(masks)}
        return server_step(server_optimizer, server, uploads.mean._replace(params=params)), metrics

    return base._replace(exchanges=(exchange._replace(local=local, update=update),))


def mask(deltas: jax.Array, clients: Any, threshold: float) -> jax.Array:
    """1 where stacked updates agree in sign, else how far they do; those of nobody are zero."""
    count = jnp.maximum(clients, 1).astype(deltas.dtype)
    agreement = jnp.abs(jnp.sum(jnp.sign(deltas), axis=0)) / count
    return jnp.where(agreement >= threshold, jnp.ones_like(agreement), agreement)


METHOD = Method(
    "gma", "Tenison 2023", "coordinates of one sign move in full",
    lambda p: gma(p.client, p.server_optimizer, weighting=p.weighting, **p.settings),
    settings={"threshold": Setting(
        0.4, "agreement from which on a coordinate is not held back", at_least=0, at_most=1
    )},
)
