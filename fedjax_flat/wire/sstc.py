"""SSTC, structured sparse ternary compression: STC within the kernels that matter most.

Mora, "Concepts and methods for efficient decentralized learning in federated settings" (PhD thesis,
Bologna 2023), chapter 4 and its Algorithm 4. A kernel is the K x K slice of a convolution for one
input and one filter; survivors of STC lie close together in few of them.

    score of a kernel = mean of its |x_i|;   J = the round(kfrac kernels) of largest score, over all
                                                 convolutions together
    STC of the weights in J and of all other kernels (dense layers), one threshold and one mu

    sent: for each kernel of J its number and K^2 signs of 2 bits; of dense layers as STC; mu

N is p of `all` weights (the text of 4.2, and the released code), or of the `selected` ones, those
in J and in dense layers (as Algorithm 4 can be read); never more than those. kfrac = 1 is STC. How
many survivors fall into kernels, and so what a message weighs, depends on the values: `bits` has
the most, as if none did, and metrics count what is sent. A convolution of side 1 has no structure
and counts as a dense layer.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat import errors
from fedjax_flat.ops.select import largest
from fedjax_flat.wire.codec import Codec, divided, joined, parted, stateless
from fedjax_flat.wire.names import Model, is_kernel
from fedjax_flat.wire.packet import Kernels, Sparse
from fedjax_flat.wire.stc import Packet, expanded, survivors_of, ternary

VARIANTS = ("all", "selected")


class Structured(NamedTuple):
    """Signs of convolutions and of dense layers, and what they are multiplied by."""

    signs: Kernels
    mu: jax.Array


def is_convolution(name: str, x: Any) -> bool:
    """(K, K, C, F) with K > 1."""
    return is_kernel(name, x) and x.ndim == 4 and x.shape[0] * x.shape[1] > 1


def sstc(
    rate: float = 0.01, kfrac: float = 0.125, variant: str = "all", accounting: str = "index"
) -> Codec:
    """STC within the kernels of largest mean magnitude, and dense layers."""
    if variant not in VARIANTS:
        errors.lookup("wire.variant", variant, dict.fromkeys(VARIANTS))

    def encode(tree, key):
        del key
        check(tree)
        weights, rest = divided(tree, is_kernel)
        if not weights:
            return Packet((), rest)
        convolutions, dense = divided(weights, is_convolution)
        chosen, kept = chosen_kernels(convolutions, kfrac)
        allowed = joined({
            name: jnp.broadcast_to(chosen.get(name, jnp.ones((), bool)), x.shape)
            for name, x in weights.items()
        })
        area = math.prod(next(iter(convolutions.values())).shape[:2])
        selected = kept * area + sum(x.size for x in dense.values())
        n = survivors_of(rate, allowed.size if variant == "all" else selected)
        signs, mu = ternary(weights, min(n, selected), allowed)
        within, others = divided(signs.values, lambda name, x: name in convolutions)
        outside = Sparse(others, signs.kept, value_bits=1) if others else ()
        return Packet(Structured(Kernels(within, chosen, outside, kept, signs.kept), mu), rest)

    def decode(packet):
        if not packet.sent:
            return packet.rest
        kernels, mu = packet.sent
        signs = {**kernels.signs, **(kernels.dense.values if kernels.dense else {})}
        return {**expanded(signs, mu), **packet.rest}

    return stateless(encode, decode, accounting, counted=True, check=check)


def check(tree: Model) -> None:
    """Refuses a model without convolutions, or with kernels of several sides."""
    weights, _ = divided(tree, is_kernel)
    convolutions, _ = divided(weights, is_convolution)
    if weights and not convolutions:
        raise errors.UsageError(
            "wire codec sstc needs a model with convolutions: this one has only "
            f"{', '.join(weights)}. Choose stc."
        )
    sides = sorted({x.shape[:2] for x in convolutions.values()})
    if len(sides) > 1:
        raise errors.UsageError(
            "wire codec sstc needs convolutions of one side: this model has "
            f"{' and '.join(f'{a} x {b}' for a, b in sides)}. Choose stc."
        )


def chosen_kernels(convolutions: Model, kfrac: float) -> tuple[Model, int]:
    """(masks of the kernels (C, F) with the largest scores over all layers, their number)."""
    scores = {name: jnp.mean(jnp.abs(x), axis=(0, 1)) for name, x in convolutions.items()}
    kept = survivors_of(kfrac, sum(x.size for x in scores.values()))
    return parted(largest(joined(scores), kept), scores), kept
