"""QSGD, the quantiser of FedPAQ: each number as a whole number of parts of its tensor's length.

Alistarh et al., "QSGD: communication-efficient SGD via gradient quantization and encoding" (NIPS
2017); Reisizadeh et al., "FedPAQ: a communication-efficient federated learning method with periodic
averaging and quantization" (AISTATS 2020): FedAvg whose updates travel so.

    y_i = ||x|| sign(x_i) l_i / s,    l_i = s |x_i| / ||x||, up or down at random, its mean as is

Sent: ||x||, and sign and level of each number together as one of 2 s + 1. Every tensor has its own
length (QSGD's buckets; FedPAQ writes one vector). The paper's shorter code of small levels is not
used: this one's length depends on shapes alone. Statistics travel as they are.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat import rng
from fedjax_flat.wire.codec import Codec, divided, stateless
from fedjax_flat.wire.names import is_parameter
from fedjax_flat.wire.packet import Levels
from fedjax_flat.wire.stc import Packet


class Quantised(NamedTuple):
    """Signed levels, and the length that they are parts of."""

    levels: Levels
    length: jax.Array


def stochastic(a: jax.Array, key: jax.Array) -> jax.Array:
    """Rounded up or down at random; the mean is a."""
    uniforms = jax.random.uniform(key, a.shape, a.dtype)
    return jnp.floor(a) + (uniforms < a - jnp.floor(a)).astype(a.dtype)


def qsgd(levels: int = 127, accounting: str = "index") -> Codec:
    """Numbers as random multiples of 1 / levels of their tensor's length."""

    def one(x, key):
        length = jnp.linalg.norm(x.reshape(-1))
        share = levels * jnp.abs(x) / jnp.where(length > 0, length, 1)
        level = jnp.sign(x) * jnp.clip(stochastic(share, key), 0, levels)
        return Quantised(Levels(level.astype(jnp.int32), 2 * levels + 1, -levels), length)

    def encode(tree, key):
        chosen, rest = divided(tree, is_parameter)
        return Packet({name: one(x, rng.fold(key, name)) for name, x in chosen.items()}, rest)

    def decode(packet):
        of = lambda p: p.length / levels * p.levels.values.astype(p.length.dtype)
        return {**{name: of(p) for name, p in packet.sent.items()}, **packet.rest}

    return stateless(encode, decode, accounting)
