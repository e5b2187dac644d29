"""STC, sparse ternary compression, of a whole network or of each layer.

Sattler et al., "Robust and communication-efficient federated learning from non-i.i.d. data" (IEEE
TNNLS 2020), as in Mora, "Concepts and methods for efficient decentralized learning in federated
settings" (PhD thesis, Bologna 2023), 4.1 and 5.2.

    N = round(p size),   I = the N largest |x_i|,   mu = mean of |x_i| over I
    y_i = mu sign(x_i) for i in I, else 0;    sent: mu, and position and sign of each i in I

`stc`        x is all kernels of a network: one threshold, one mu. Biases travel as they are, unless
             they are part of x too (`biases`, as in the paper).
`layer_stc`  every kernel by itself, with its own rate and mu; a layer without a rate has 8 bits.

Equal |x_i| are taken in the order of the network; a half of N goes to the even number. With error
feedback, up and down, it is the paper's protocol (algorithms/compressed.py).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat import errors
from fedjax_flat.ops.select import largest
from fedjax_flat.wire.codec import Codec, divided, joined, parted, stateless
from fedjax_flat.wire.eight_bit import EightBit, quantised, restored
from fedjax_flat.wire.names import Model, is_kernel, is_parameter
from fedjax_flat.wire.packet import WORD, Sparse

# The thesis' rates of conv1, conv2, fc512 and fc62, by the numbers of Table 5.2.
PUBLISHED = {
    "1": ".01,.01,.01,.01", "2": "-,.05,.0075,.05", "3": "-,.1,.005,.1", "4": "-,-,.01,-"
}


class Ternary(NamedTuple):
    """Signs where something survives, and what they are multiplied by."""

    signs: Sparse
    mu: jax.Array


class Packet(NamedTuple):
    """What is compressed, () if nothing is, and what travels as it is."""

    sent: Any
    rest: Model


def ternary(arrays: Model, n: int, allowed: jax.Array | None = None) -> Ternary:
    """The n largest of arrays taken as one vector, or of the allowed part of it."""
    x = joined(arrays)
    size = jnp.abs(x)
    mask = largest(size if allowed is None else jnp.where(allowed, size, -1), n)
    mu = jnp.sum(jnp.where(mask, size, 0)) / max(n, 1)
    signs = jnp.where(mask, jnp.sign(x), 0).astype(jnp.int8)
    return Ternary(Sparse(parted(signs, arrays), n, value_bits=1), mu)


def expanded(signs: Model, mu: jax.Array) -> Model:
    """mu sign(x)."""
    return {name: mu * s.astype(mu.dtype) for name, s in signs.items()}


def survivors_of(rate: float, size: int) -> int:
    """N = round(rate size), a half to the even number."""
    return round(rate * size)


def stc(rate: float = 0.01, biases: bool = False, accounting: str = "index") -> Codec:
    """The largest of all kernels, as signs at one magnitude."""
    part = is_parameter if biases else is_kernel

    def encode(tree, key):
        del key
        chosen, rest = divided(tree, part)
        n = survivors_of(rate, sum(x.size for x in chosen.values()))
        return Packet(ternary(chosen, n) if chosen else (), rest)

    return stateless(encode, decoded, accounting)


def decoded(packet: Packet) -> Model:
    """What a receiver has of a ternary packet."""
    sent = expanded(packet.sent.signs.values, packet.sent.mu) if packet.sent else {}
    return {**sent, **packet.rest}


def layer_stc(rates: str = "4", accounting: str = "index") -> Codec:
    """STC of every kernel by itself, at its own rate; '-' is 8 bits."""
    wanted = parse_rates(rates)

    def check(tree):
        kernels = [name for name, x in tree.items() if is_kernel(name, x)]
        if kernels and len(kernels) != len(wanted):
            raise errors.UsageError(
                f"wire.rates = {rates!r} has {len(wanted)} rates and the model {len(kernels)} "
                f"kernels: expected one for each of {', '.join(kernels)}."
            )

    def one(x, rate):
        if rate is None:
            return quantised(x)
        n = survivors_of(rate, x.size)
        return ternary({"": x}, n)

    def encode(tree, key):
        del key
        check(tree)
        kernels, rest = divided(tree, is_kernel)
        pairs = zip(kernels.items(), wanted, strict=False)  # a part without kernels has none
        return Packet({name: one(x, rate) for (name, x), rate in pairs}, rest)

    def decode(packet):
        def of(p):
            return restored(p) if isinstance(p, EightBit) else expanded(p.signs.values, p.mu)[""]

        return {**{name: of(p) for name, p in packet.sent.items()}, **packet.rest}

    return stateless(encode, decode, accounting, check=check)


def parse_rates(text: str) -> list[float | None]:
    """'-,.05,.01' as [None, .05, .01]; a number from 1 to 4 is one of Mora's."""
    words = [word.strip() for word in PUBLISHED.get(text.strip(), text).split(",")]
    rates: list[float | None] = []
    for word in words:
        try:
            rate = 0.0 if word in ("-", "none") else float(word)
        except ValueError:
            rate = -1.0
        if not 0 <= rate <= 1:
            raise errors.UsageError(
                f"wire.rates = {text!r} has {word!r}: expected a rate above 0 and at most 1 for "
                "each kernel, or - for 8 bits, as in '-,.05,.0075,.05'; or 1, 2, 3 or 4, Mora's."
            )
        rates.append(rate or None)
    return rates


def rate_for(factor: float, full: int, sizes: list[int], biases: int, layer: int = 2) -> float:
    """The rate of one layer that makes 32 `full` bits `factor` times as much as what is sent.

    Mora's heterogeneous rates (p.l. HSTC): the other layers of a sub-model of `sizes` have 8 bits,
    survivors and biases 32.
    """
    others = 8 * (sum(sizes) - sizes[layer]) + WORD * biases
    rate = (WORD * full / factor - others) / (WORD * sizes[layer])
    if not 0 < rate <= 1:
        raise errors.UsageError(
            f"a factor of {factor:g} would need the rate {rate:.4g} for layer {layer + 1}: the "
            f"others alone weigh {others} bits of {WORD * full / factor:.0f}."
        )
    return rate
