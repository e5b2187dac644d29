"""8 bits: every tensor by itself, affine from its least to its largest value on 256 levels.

    step = (max - min) / 255,    sent: round((x - min) / step) in 8 bits, and min and step

Mora (2023, chapter 5) sends models down this way, and says no more than "8-bit quantisation".
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat.wire.codec import Codec, stateless
from fedjax_flat.wire.packet import Levels

TOP = 255


class EightBit(NamedTuple):
    """A tensor's packet."""

    levels: Levels
    least: jax.Array
    step: jax.Array


def quantised(x: jax.Array) -> EightBit:
    """A tensor to the nearest of 256 levels."""
    least, largest = jnp.min(x), jnp.max(x)
    step = (largest - least) / TOP
    levels = jnp.round((x - least) / jnp.where(step > 0, step, 1))
    return EightBit(Levels(jnp.clip(levels, 0, TOP).astype(jnp.uint8), TOP + 1), least, step)


def restored(packet: EightBit) -> jax.Array:
    """What a receiver has of it."""
    return packet.least + packet.step * packet.levels.values.astype(packet.least.dtype)


def eight_bit(accounting: str = "index") -> Codec:
    """A byte per number, and two floats per tensor."""
    is_packet = lambda x: isinstance(x, EightBit)
    return stateless(
        lambda tree, key: jax.tree.map(quantised, tree),
        lambda packet: jax.tree.map(restored, packet, is_leaf=is_packet),
        accounting,
        changes=False,
    )
