"""Sparse messages of other kinds: top-k, SBC, random masks.

`topk`   the N = round(p size) largest |x_i| as they are, positions and values: STC without the
         ternary step, and with `feedback` the gradient dropping of Aji and Heafield (EMNLP 2017).
`sbc`    Sattler et al., "Sparse binary compression" (IJCNN 2019), as in Mora (2023), 3.1: of the N
         largest |x_i| the positive and the negative ones have their means mu+ and mu-; only the
         sign whose mean is larger in magnitude is sent, all at that mean, positions alone. What is
         left of N is counted. `original` takes the N largest x_i against the N largest -x_i.
`mask`   Konecny et al., "Federated learning: strategies for improving communication efficiency"
         (2016): N positions at random, which a seed tells, and their values, multiplied by size / N
         so that the mean is x (`unbiased`), or as they are, as error feedback needs them. The
         paper's structured updates train on the mask; here what was trained is subsampled.

As in stc.py, kernels are compressed and the rest travels as it is.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat.ops.select import at_random, largest
from fedjax_flat.wire.codec import Codec, divided, joined, parted, stateless
from fedjax_flat.wire.names import Model, is_kernel, is_parameter
from fedjax_flat.wire.packet import Seeded, Sparse
from fedjax_flat.wire.stc import Packet, decoded, survivors_of


class Binary(NamedTuple):
    """Ones where something survives, and the value they all have."""

    signs: Sparse
    mu: jax.Array


def topk(rate: float = 0.01, biases: bool = False, accounting: str = "index") -> Codec:
    """The largest of all kernels, as they are."""

    def encode(tree, key):
        del key
        chosen, rest = divided(tree, is_parameter if biases else is_kernel)
        if not chosen:
            return Packet((), rest)
        x = joined(chosen)
        n = survivors_of(rate, x.size)
        kept = jnp.where(largest(jnp.abs(x), n), x, 0)
        return Packet(Sparse(parted(kept, chosen), n, value_bits=32), rest)

    return stateless(encode, _as_sent, accounting)


def _as_sent(packet: Packet) -> Model:
    return {**(packet.sent.values if packet.sent else {}), **packet.rest}


def sbc(
    rate: float = 0.01, original: bool = False, biases: bool = False, accounting: str = "index"
) -> Codec:
    """The largest of one sign, all at their mean; positions alone."""

    def encode(tree, key):
        del key
        chosen, rest = divided(tree, is_parameter if biases else is_kernel)
        if not chosen:
            return Packet((), rest)
        x = joined(chosen)
        n = survivors_of(rate, x.size)
        if original:
            plus, minus = largest(x, n), largest(-x, n)
        else:
            mask = largest(jnp.abs(x), n)
            plus, minus = mask & (x > 0), mask & (x < 0)
        mean_plus, mean_minus = _mean(x, plus), _mean(x, minus)
        positive = mean_plus >= -mean_minus
        mu = jnp.where(positive, mean_plus, mean_minus)
        side = jnp.where(positive, plus, minus).astype(jnp.int8)
        return Packet(Binary(Sparse(parted(side, chosen), n, value_bits=0), mu), rest)

    return stateless(encode, decoded, accounting, counted=not original)


def _mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Over a mask; 0 if it is empty."""
    count = jnp.sum(mask, dtype=jnp.int32)
    return jnp.sum(jnp.where(mask, x, 0)) / jnp.maximum(count, 1).astype(x.dtype)


def mask(
    rate: float = 0.01, unbiased: bool = True, biases: bool = False, accounting: str = "index"
) -> Codec:
    """Some of all kernels at random, where a seed tells which."""

    def encode(tree, key):
        chosen, rest = divided(tree, is_parameter if biases else is_kernel)
        if not chosen:
            return Packet((), rest)
        x = joined(chosen)
        n = survivors_of(rate, x.size)
        seed = jax.random.key_data(key)
        scale = x.size / max(n, 1) if unbiased else 1.0
        kept = jnp.where(at_random(seed, x.size, n), scale * x, 0)
        return Packet(Seeded(parted(kept, chosen), seed, n), rest)

    return stateless(encode, _as_sent, accounting)
