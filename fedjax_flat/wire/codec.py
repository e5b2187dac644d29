"""Codecs: what is sent instead of the numbers themselves.

`encode(tree, state, key) -> (packet, state)` and `decode(packet) -> tree`; `state` is what a sender
keeps between rounds (residuals), () for most. `bits(tree)` counts what a packet weighs from shapes
alone. A tree is any dict or tuple of arrays.

8 bit: every tensor by itself, affine from its least to its largest value on 256 levels,

    step = (max - min) / 255,    sent: round((x - min) / step) in 8 bits, and min and step
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

LEVELS = 255


class Codec(NamedTuple):
    """Pure functions."""

    init: Callable[[Any], Any]
    encode: Callable[[Any, Any, jax.Array], tuple[Any, Any]]
    decode: Callable[[Any], Any]
    bits: Callable[[Any], int]


class EightBit(NamedTuple):
    """A tensor's packet."""

    levels: jax.Array
    least: jax.Array
    step: jax.Array


def eight_bit() -> Codec:
    """A byte per number, and two floats per tensor."""

    def encode(tree, state, key):
        del key

        def one(x):
            least, largest = jnp.min(x), jnp.max(x)
            step = (largest - least) / LEVELS
            levels = jnp.round((x - least) / jnp.where(step > 0, step, 1))
            return EightBit(jnp.clip(levels, 0, LEVELS).astype(jnp.uint8), least, step)

        return jax.tree.map(one, tree), state

    def decode(packet):
        one = lambda p: p.least + p.step * p.levels.astype(p.least.dtype)
        return jax.tree.map(one, packet, is_leaf=lambda x: isinstance(x, EightBit))

    def bits(tree):
        return sum(8 * x.size + 2 * 32 for x in jax.tree.leaves(tree))

    return Codec(lambda tree: (), encode, decode, bits)


def bits_of(tree: Any) -> int:
    """What a tree weighs as it is."""
    return sum(8 * x.dtype.itemsize * x.size for x in jax.tree.leaves(tree))
