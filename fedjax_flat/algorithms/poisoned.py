"""Any algorithm some of whose members send poisoned models.

    upload of an attacker:   factor (w - w_k)     factor = -1: the sign flipped; 1 / p_k: its own
                                                  model in place of the average

Attackers are round(share K) members, clients or groups, drawn by the seed. They train as others do,
and keep what they would have kept. The defences are in robust.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_flat import errors
from fedjax_flat.algorithms.base import Algorithm, Exchange


def poisoned(algorithm: Algorithm, members: np.ndarray, factor: float) -> Algorithm:
    """`algorithm` in which these members multiply what they send by `factor`."""
    errors.finite("factor", factor)

    def bad(part: Exchange) -> Exchange:
        def local(message, state, data, round, key):
            reply = part.local(message, state, data, round, key)
            if any(jnp.ndim(x) for x in jax.tree.leaves(reply.each)):
                raise errors.UsageError(
                    "attack.share: this method sends more than differences of models, and an "
                    "attack on that is not defined. Choose one that averages, e.g. fedavg."
                )
            attacks = jnp.isin(jnp.asarray(data.client, jnp.int32), jnp.asarray(members, jnp.int32))
            scale = jnp.where(attacks, jnp.float32(factor), jnp.float32(1))
            return reply._replace(
                mean=optax.tree.scale(scale, reply.mean), sum=optax.tree.scale(scale, reply.sum)
            )

        return part._replace(local=local)

    return algorithm._replace(exchanges=tuple(bad(part) for part in algorithm.exchanges))


def chosen(members: int, share: float, seed: int) -> np.ndarray:
    """Who attacks: round(share K) of K members."""
    order = np.random.default_rng([seed, 20]).permutation(members)
    return np.sort(order[: round(share * members)])
