"""Sketched updates: a random rotation, then a few bits for each number.

Konecny et al., "Federated learning: strategies for improving communication efficiency" (2016);
Caldas et al., "Expanding the reach of federated learning by reducing client resource requirements"
(2018), who send the model down this way too: here as well it is the message itself that is encoded.

    z = H D x / sqrt(n),    D random signs, H the Walsh-Hadamard matrix of a power of two, n
    sent: z on 2^bits levels from its least to its largest, up or down at random, its mean as is;
          least, step, and the seed of D

Rotated numbers are much alike, so that levels lose less. Every tensor by itself, in blocks of n =
8192 numbers (the papers rotate all of it, padded to a power of two, which would be sent as well),
the last one padded with zeros; a smaller tensor is one block. Statistics travel as they are.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_flat import rng
from fedjax_flat.wire.codec import Codec, divided, stateless
from fedjax_flat.wire.names import is_parameter
from fedjax_flat.wire.packet import Levels
from fedjax_flat.wire.qsgd import stochastic
from fedjax_flat.wire.stc import Packet

BLOCK = 8192


class Rotated(struct.PyTreeNode):
    """A tensor's packet; least and step of every block."""

    levels: Levels
    least: jax.Array
    step: jax.Array
    shape: tuple[int, ...] = struct.field(pytree_node=False)  # known to both sides


class Sketch(NamedTuple):
    """A model's tensors, and the seed of their rotations."""

    tensors: dict[str, Rotated]
    seed: jax.Array


def rotation(bits: int = 4, accounting: str = "index") -> Codec:
    """A few bits per number of each tensor, after a random rotation."""
    top = 2**bits - 1

    def one(name, x, key):
        z = hadamard(in_blocks(signs_of(name, x.size, key) * x.reshape(-1)))
        least = jnp.min(z, axis=1, keepdims=True)
        step = (jnp.max(z, axis=1, keepdims=True) - least) / top
        a = (z - least) / jnp.where(step > 0, step, 1)
        levels = jnp.clip(stochastic(a, rng.fold(key, name, "levels")), 0, top)
        return Rotated(Levels(levels.astype(jnp.int32), top + 1), least, step, x.shape)

    def encode(tree, key):
        chosen, rest = divided(tree, is_parameter)
        if not chosen:
            return Packet((), rest)
        tensors = {name: one(name, x, key) for name, x in chosen.items()}
        return Packet(Sketch(tensors, jax.random.key_data(key)), rest)

    def decode(packet):
        if not packet.sent:
            return packet.rest
        key = jax.random.wrap_key_data(packet.sent.seed)

        def of(name, p):
            z = hadamard(p.least + p.step * p.levels.values.astype(p.least.dtype))
            size = math.prod(p.shape)
            return (signs_of(name, size, key) * z.reshape(-1)[:size]).reshape(p.shape)

        return {**{n: of(n, p) for n, p in packet.sent.tensors.items()}, **packet.rest}

    return stateless(encode, decode, accounting, changes=False)


def signs_of(name: str, size: int, key: jax.Array) -> jax.Array:
    """D of a tensor: every bit of random words is one."""
    words = jax.random.bits(rng.fold(key, name, "signs"), (-(-size // 32), 1), jnp.uint32)
    bits = words >> jnp.arange(32, dtype=jnp.uint32)[None] & 1
    return 1 - 2 * bits.reshape(-1)[:size].astype(jnp.float32)


def in_blocks(x: jax.Array) -> jax.Array:
    """A vector as rows, padded with zeros."""
    length = min(BLOCK, 2 ** (x.size - 1).bit_length())
    return jnp.pad(x, (0, -x.size % length)).reshape(-1, length)


def hadamard(x: jax.Array) -> jax.Array:
    """H z / sqrt(n) of every row z, in log2(n) steps of sums and differences; twice is z again."""
    rows, n = x.shape
    half = 1
    while half < n:
        pairs = x.reshape(rows, -1, 2, half)
        x = jnp.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
        x, half = x.reshape(rows, n), 2 * half
    return x / math.sqrt(n)
