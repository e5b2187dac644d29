"""FedGH: gradient harmonisation on the server, and how often client updates conflict.

Zhang et al., "FedGH: heterogeneous federated learning via gradient harmonization" (2023).

    for every pair i < j of the cohort with d_i . d_j < 0, both from the values before the pair:
        d_i <- d_i - (d_i . d_j / ||d_j||^2) d_j,     d_j <- d_j - (d_j . d_i / ||d_i||^2) d_i
    w <- SERVEROPT(w, weighted mean of the d_k)

d_k is the whole update of client k, or each layer by itself (`scope`). A conflict is a pair with a
negative inner product within one layer; the metrics count them over all pairs, before and after.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_flat import errors
from fedjax_flat.algorithms.base import Algorithm, combine
from fedjax_flat.algorithms.fedavg import fedavg, server_step
from fedjax_flat.algorithms.method import Method
from fedjax_flat.client import Client
from fedjax_flat.server import aggregate
from fedjax_flat.settings import Setting


def fedgh(
    client: Client,
    server_optimizer: optax.GradientTransformation,
    *,
    scope: str = "model",
    weighting: str = "examples",
) -> Algorithm:
    """FedGH; clients train as in FedAvg."""
    harmonise = errors.lookup("scope", scope, {"model": harmonised, "layer": harmonised_layers})
    base = fedavg(client, server_optimizer, weighting=weighting)
    (exchange,) = base.exchanges

    def local(message, state, data, round, key):
        reply = exchange.local(message, state, data, round, key)
        stats = reply.mean._replace(params=())
        return reply._replace(mean=stats, each=reply.mean.params)

    def update(server, uploads, round):
        del round
        deltas = harmonise(uploads.each)
        params = aggregate.mean_of(deltas, uploads.weights)
        metrics = conflicts(uploads.each, "before") | conflicts(deltas, "after")
        return server_step(server_optimizer, server, uploads.mean._replace(params=params)), metrics

    return base._replace(exchanges=(exchange._replace(local=local, update=update),))


def harmonised(deltas: Any) -> Any:
    """All conflicting pairs of a cohort, in order, each projected off the other."""
    count = jax.tree.leaves(deltas)[0].shape[0]
    if count == 1:
        return deltas
    first, second = jnp.triu_indices(count, 1)

    def pair(p, deltas):
        i, j = first[p], second[p]
        a, b = (jax.tree.map(lambda d, k=k: d[k], deltas) for k in (i, j))
        dot = jnp.minimum(optax.tree.vdot(a, b), 0)  # nothing is done where they agree
        off = lambda x, y: combine(x, -dot / jnp.maximum(optax.tree.vdot(y, y), 1e-30), y)
        put = lambda tree, k, new: jax.tree.map(lambda d, n: d.at[k].set(n), tree, new)
        return put(put(deltas, i, off(a, b)), j, off(b, a))

    return jax.lax.fori_loop(0, first.size, pair, deltas)


def harmonised_layers(deltas: Any) -> Any:
    """The same within each top-level module."""
    return {name: harmonised(layer) for name, layer in deltas.items()}


def conflicts(deltas: Any, when: str) -> dict[str, jax.Array]:
    """Pairs with a negative inner product, for each top-level module."""

    def count(layer):
        leaves = [d.reshape(d.shape[0], -1) for d in jax.tree.leaves(layer)]
        gram = sum(d @ d.T for d in leaves)
        return jnp.sum(jnp.triu(gram < 0, 1).astype(jnp.float32))

    return {f"conflicts_{when}/{name}": count(layer) for name, layer in deltas.items()}


METHOD = Method(
    "fedgh", "Zhang 2023", "conflicts projected off each other",
    lambda p: fedgh(p.client, p.server_optimizer, weighting=p.weighting, **p.settings),
    settings={"scope": Setting("model", "what is projected", choices=("model", "layer"))},
)
