"""Sums of numbers that nobody sees: fixed point modulo 2^32, under masks that cancel.

Bonawitz et al., "Practical secure aggregation for privacy-preserving machine learning" (CCS 2017).

    x_u = rint(2^f v_u) mod 2^32                         from 2^31 on, values are negative
    y_u = x_u + PRG(b_u) + sum over members v of  PRG(s_uv) if u < v,  -PRG(s_uv) if u > v
    sum over senders of x_u = sum of y_u - PRG(b_u) - the pair masks with members that sent nothing

All sums are modulo 2^32, so they are exact, whatever their order. The sum is right if no entry of
it reaches 2^(31 - f). One key stands for what key agreement and secret sharing would give: s_uv and
b_u are drawn from it, and opening a mask is drawing it again.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_flat import rng


def encode(tree: Any, fraction_bits: int) -> Any:
    """Fixed point, halves to even."""
    one = lambda x: jnp.rint(x * 2.0**fraction_bits).astype(jnp.int32)
    return jax.tree.map(lambda x: jax.lax.bitcast_convert_type(one(x), jnp.uint32), tree)


def decode(tree: Any, fraction_bits: int) -> Any:
    """Numbers again."""
    one = lambda x: jax.lax.bitcast_convert_type(x, jnp.int32).astype(jnp.float32)
    return jax.tree.map(lambda x: one(x) / 2.0**fraction_bits, tree)


def own_mask(key: jax.Array, u: jax.Array, like: Any) -> Any:
    """PRG(b_u)."""
    return _draw(rng.fold(key, "own", u), like)


def pair_mask(key: jax.Array, u: jax.Array, v: jax.Array, like: Any) -> Any:
    """What u adds for v: the two of a pair add up to 0."""
    drawn = _draw(rng.fold(key, "pair", jnp.minimum(u, v), jnp.maximum(u, v)), like)
    return jax.tree.map(lambda x: jnp.where(u < v, x, -x), drawn)


def masked(key: jax.Array, u: jax.Array, x: Any, members: jax.Array) -> Any:
    """y_u; `members` are client numbers, -1 for none, and u is one of them."""

    def add(i, y):
        v = members[i]
        add_pair = lambda y: _plus(y, pair_mask(key, u, v, x))
        return jax.lax.cond((v >= 0) & (v != u), add_pair, lambda y: y, y)

    return jax.lax.fori_loop(0, members.shape[0], add, _plus(x, own_mask(key, u, x)))


def unmasked(key: jax.Array, total: Any, members: jax.Array, sent: jax.Array) -> Any:
    """The sum of x over the members that `sent` theirs, of the sum of their y."""
    lost = (members >= 0) & ~sent
    keep = lambda total: total

    def sender(i, total):
        u = members[i]

        def missed(j, total):
            open_pair = lambda total: _minus(total, pair_mask(key, u, members[j], total))
            return jax.lax.cond(lost[j], open_pair, keep, total)

        def open_all(total):
            total = _minus(total, own_mask(key, u, total))
            return jax.lax.fori_loop(0, members.shape[0], missed, total)

        return jax.lax.cond(sent[i], open_all, keep, total)

    return jax.lax.fori_loop(0, members.shape[0], sender, total)


def _draw(key: jax.Array, like: Any) -> Any:
    leaves, structure = jax.tree.flatten(like)
    draws = [jax.random.bits(rng.fold(key, i), x.shape, jnp.uint32) for i, x in enumerate(leaves)]
    return jax.tree.unflatten(structure, draws)


def _plus(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


def _minus(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.subtract, a, b)
