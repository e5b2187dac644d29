"""Randomness is folded, never re-seeded: key = fold(key, purpose, round, client, step).

A purpose is a string. It enters through its CRC-32, so a new consumer of randomness with a new
purpose changes no other stream.
"""

import zlib

import jax


def fold(key: jax.Array, *parts: str | int | jax.Array) -> jax.Array:
    """The key of the stream named by `parts`."""
    for part in parts:
        key = jax.random.fold_in(key, zlib.crc32(part.encode()) if isinstance(part, str) else part)
    return key


def fold_each(key: jax.Array, count: int) -> jax.Array:
    """`count` keys, the i-th independent of `count`: a longer batch has the same first keys."""
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jax.numpy.arange(count))
