"""Sketched updates: a random rotation, then a few bits for each number.

Konecny et al., "Federated learning: strategies for improving communication efficiency" (2016);
Caldas et al., "Expanding the reach of federated learning by reducing client resource requirements"
(2018), who send the model down this way too: here as well it is the message itself that is encoded.

    z = H D x / sqrt(size),   D random signs, H the Walsh-Hadamard matrix, x padded to a power of 2
    sent: z on 2^bits levels from its least to its largest, up or down at random, its mean as is;
          least, step, and the seed of D

Rotated numbers are much alike, so that levels lose less. Every tensor by itself; padding is sent.
Statistics travel as they are.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from fedjax_flat import rng
from fedjax_flat.wire.codec import Codec, divided, stateless
from fedjax_flat.wire.names import is_parameter
from fedjax_flat.wire.packet import Levels
from fedjax_flat.wire.qsgd import stochastic
from fedjax_flat.wire.stc import Packet

AT_ONCE = 64  # factors of H that are multiplied as matrices


class Rotated(struct.PyTreeNode):
    """A tensor's packet."""

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
        z = hadamard(_padded(_signs(name, x.size, key) * x.reshape(-1)))
        least, largest = jnp.min(z), jnp.max(z)
        step = (largest - least) / top
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
            return (_signs(name, size, key) * z[:size]).reshape(p.shape)

        return {**{n: of(n, p) for n, p in packet.sent.tensors.items()}, **packet.rest}

    return stateless(encode, decode, accounting, changes=False)


def _signs(name: str, size: int, key: jax.Array) -> jax.Array:
    """D of a tensor."""
    return jax.random.rademacher(rng.fold(key, name, "signs"), (size,), jnp.float32)


def _padded(x: jax.Array) -> jax.Array:
    return jnp.pad(x, (0, 2 ** (x.size - 1).bit_length() - x.size))


def hadamard(x: jax.Array) -> jax.Array:
    """H x / sqrt(size) of a vector whose size is a power of two; twice is x again.

    H is a Kronecker product of small ones: each multiplies one axis, and takes it to the end.
    """
    left = x.size
    while left > 1:
        factor = min(left, AT_ONCE)
        left //= factor
        small = jnp.asarray(_matrix(factor), x.dtype)
        x = jnp.matmul(x.reshape(factor, -1).T, small, precision="highest").reshape(-1)
    return x


def _matrix(n: int) -> np.ndarray:
    """The orthonormal matrix in Sylvester's order."""
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.kron(np.array([[1, 1], [1, -1]]), h)
    return h / math.sqrt(n)
