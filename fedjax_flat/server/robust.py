"""Means of uploads that a few clients cannot move at will.

Trimmed mean and median, coordinate by coordinate, every client alike: Xie et al., "SLSGD: secure
and efficient distributed on-device machine learning" (ECML 2019); Yin et al. (ICML 2018).

    trimmed mean   without the b smallest and the b largest values of m clients
    median         the same with the largest b that leaves something, (m - 1) // 2

Where fewer clients take part than b asks for, b is that largest one. A value that is no number
counts as the largest.

FoolsGold: Fung et al., "The limitations of federated learning in sybil settings" (RAID 2020). H_k
is the sum of client k's uploads so far. In the order of the authors' code,

    s_ij = cosine of H_i and H_j, s_ii = 0;    v_i = max_j s_ij
    s_ij <- s_ij v_i / v_j where v_i < v_j                                   (pardoning)
    a_i  = 1 - max_j s_ij, in [0, 1];   a <- a / max a
    a_i <- kappa (ln(a_i / (1 - a_i)) + 1/2), in [0, 1]

so clients that pull the same way, round after round, are hardly heard. If all are alike none is:
the code divides 0 by 0.
"""

from typing import Any

import jax
import jax.numpy as jnp

ALIKE = 1e-5  # 1 - cosine below this is rounding


def trimmed_mean(stacked: Any, present: jax.Array, trim: int | None) -> Any:
    """Of trees stacked over clients, those that are `present`; trim None is the median."""
    count = jnp.sum(present.astype(jnp.int32))
    most = jnp.maximum((count - 1) // 2, 0)
    b = most if trim is None else jnp.minimum(trim, most)
    rank = jnp.arange(present.shape[0])
    inner = (rank >= b) & (rank < count - b)
    left = jnp.maximum(count - 2 * b, 1)

    def one(x):
        along = lambda flags: flags.reshape(-1, *(1,) * (x.ndim - 1))
        there = along(present) & ~jnp.isnan(x)
        ordered = jnp.sort(jnp.where(there, x, jnp.full_like(x, jnp.inf)), axis=0)
        total = jnp.sum(jnp.where(along(inner), ordered, jnp.zeros_like(x)), axis=0)
        return total / left.astype(x.dtype)

    return jax.tree.map(one, stacked)


def foolsgold_weights(histories: jax.Array, present: jax.Array, kappa: float = 1.0) -> jax.Array:
    """A weight in [0, 1] per client; histories are (clients, numbers), 0 for those not present."""
    lengths = jnp.linalg.norm(histories, axis=1, keepdims=True)
    heard = (lengths > 0) & present[:, None]
    units = jnp.where(heard, histories / jnp.where(lengths > 0, lengths, 1), 0.0)
    similar = units @ units.T
    similar = jnp.where(jnp.eye(present.shape[0], dtype=bool), 0.0, similar)
    v = jnp.max(similar, axis=1)
    mine, theirs = v[:, None], v[None]
    pardon = jnp.where(mine < theirs, mine / jnp.where(theirs > 0, theirs, 1), 1.0)
    a = jnp.clip(1 - jnp.max(similar * pardon, axis=1), 0, 1) * present.astype(v.dtype)
    largest = jnp.max(a)
    a = jnp.clip(a / jnp.where(largest > 0, largest, 1), 0, 0.99)
    a = jnp.where(a > 0, kappa * (jnp.log(a) - jnp.log1p(-a) + 0.5), 0.0)
    return jnp.where(largest > ALIKE, jnp.clip(a, 0, 1), 0.0)
