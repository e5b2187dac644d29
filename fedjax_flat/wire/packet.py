"""What packets are made of, and what they weigh by three rules.

A packet is a tree of plain arrays, which travel as they are, and of the parts below. In the
compiled round their arrays are dense, with zeros where nothing is sent; `pack.py` writes the bytes.

| rule     | a survivor                                      | what else                          |
|----------|-------------------------------------------------|------------------------------------|
| `index`  | its position, 1 + floor(log2(size)) bits, and   | scalars 32, arrays as they are     |
|          | its sign (1) or its value (32)                  |                                    |
| `word`   | 32 bits in all: Mora's rule, Tables 5.2 and 5.3 | scalars free, arrays as they are   |
| `packed` | the gap to the last one, Golomb-coded, at its   | as `index`, filled up to bytes;    |
|          | mean length, and its sign or its value          | 32 bits for how many there are     |

`index` is the default: it depends on shapes alone, and a receiver could read such a message. Mora
(2023, 4.1) counts positions the same way, over convolutions alone and without signs and scalars.
`packed` is what `pack` writes, to a percent or so: as if survivors fell anywhere alike.

A gap g >= 1 is q ones, a zero and r in b bits, g - 1 = q 2^b + r; of a share p that survives

    b = 1 + floor(log2(log(phi - 1) / log(1 - p))),   phi = (1 + sqrt 5) / 2
    mean length = b + 1 / (1 - (1 - p)^(2^b)) bits          (Golomb; Sattler et al. 2020)
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_flat import errors

RULES = ("index", "word", "packed")
WORD = 32


class Levels(struct.PyTreeNode):
    """Whole numbers from `least` on, of so many symbols: each in as few bits as name them.

    Three symbols go five to a byte.
    """

    values: jax.Array
    symbols: int = struct.field(pytree_node=False)
    least: int = struct.field(pytree_node=False, default=0)

    def bits(self, rule: str) -> int:
        """The same by all rules, but for the last byte."""
        size = self.values.size
        if self.symbols == 3:
            return 8 * -(-size // 5)
        total = size * (self.symbols - 1).bit_length()
        return 8 * -(-total // 8) if rule == "packed" else total


class Sparse(struct.PyTreeNode):
    """A few survivors of one vector, the arrays of `values` after each other; zeros elsewhere.

    `kept` is their number, for some codecs the most there can be. Each has a value of 0 bits (they
    are alike), 1 (a sign) or 32.
    """

    values: dict[str, jax.Array]
    kept: int = struct.field(pytree_node=False)
    value_bits: int = struct.field(pytree_node=False)

    @property
    def size(self) -> int:
        """Of the vector."""
        return sum(x.size for x in self.values.values())

    def bits(self, rule: str) -> int:
        """Of `kept` survivors."""
        if rule == "word":
            return WORD * self.kept
        if rule == "index":
            return self.kept * (self.size.bit_length() + self.value_bits)
        share = self.kept / self.size
        length = golomb_mean(share, golomb_parameter(share)) if self.kept else 0.0
        return WORD + 8 * math.ceil(self.kept * (length + self.value_bits) / 8)

    def counted(self, rule: str) -> jax.Array:
        """Of as many as there are."""
        n = sum((jnp.sum(x != 0, dtype=jnp.int32) for x in self.values.values()), jnp.int32(0))
        if rule == "word":
            return WORD * n
        if rule == "index":
            return n * (self.size.bit_length() + self.value_bits)
        b, real = golomb_parameter(self.kept / self.size), n.astype(jnp.float32)
        length = golomb_mean(jnp.maximum(real, 1) / self.size, b)
        total = jnp.ceil(real * (length + self.value_bits) / 8)
        return WORD + 8 * total.astype(jnp.int32)


class Seeded(struct.PyTreeNode):
    """Some values of a vector as they are, at places that a seed tells (select.at_random)."""

    values: dict[str, jax.Array]
    seed: jax.Array
    kept: int = struct.field(pytree_node=False)

    @property
    def size(self) -> int:
        """Of the vector."""
        return sum(x.size for x in self.values.values())

    def bits(self, rule: str) -> int:
        """A float each, and the seed."""
        return WORD * self.kept + (0 if rule == "word" else bits_of(self.seed))


class Kernels(struct.PyTreeNode):
    """Whole kernels of convolutions (K, K, C, F), and of dense layers a few survivors.

    A kernel is the K x K slice of one input and one filter; `chosen` says which of the (C, F) are
    sent, `kept` how many in all; K is the same in all layers. Each is sent as its number, in 1 +
    floor(log2(kernels)) bits, and K^2 signs of 2 bits, as Mora counts (4.1). `survivors` is the
    number of weights that are not 0, in kernels and in dense layers.
    """

    signs: dict[str, jax.Array]
    chosen: dict[str, jax.Array]
    dense: Any  # Sparse, or () where there is no dense layer
    kept: int = struct.field(pytree_node=False)
    survivors: int = struct.field(pytree_node=False)

    @property
    def size(self) -> int:
        """Of all weights."""
        return sum(x.size for x in self.signs.values()) + (self.dense.size if self.dense else 0)

    def map_bits(self, rule: str) -> int:
        """Of the kernels alone."""
        number = sum(x.size for x in self.chosen.values()).bit_length()
        area = math.prod(next(iter(self.signs.values())).shape[:2])
        total = self.kept * (number + 2 * area)
        return WORD + 8 * -(-total // 8) if rule == "packed" else total

    def bits(self, rule: str) -> int:
        """As if no survivor fell into kernels."""
        if rule == "word":
            return WORD * self.survivors
        return self.map_bits(rule) + (self.dense.bits(rule) if self.dense else 0)

    def counted(self, rule: str) -> jax.Array:
        """Of the survivors that there are in dense layers."""
        if rule == "word" or not self.dense:
            return jnp.int32(self.bits(rule))
        return self.map_bits(rule) + self.dense.counted(rule)


PARTS = (Levels, Sparse, Seeded, Kernels)


def parts_of(packet: Any) -> list[Any]:
    """The packet's parts and plain arrays, in order."""
    return jax.tree.leaves(packet, is_leaf=lambda x: isinstance(x, PARTS))


def weigh(packet: Any, rule: str) -> int:
    """Bits of a packet, from its shapes."""
    if rule not in RULES:
        errors.lookup("accounting", rule, dict.fromkeys(RULES))
    return sum(
        x.bits(rule) if isinstance(x, PARTS)
        else 0 if rule == "word" and not x.ndim
        else bits_of(x)
        for x in parts_of(packet)
    )


def weigh_counted(packet: Any, rule: str) -> jax.Array:
    """Bits of a packet of which shapes say only the most it can weigh, from what is in it."""
    total = jnp.int32(0)
    for x in parts_of(packet):
        varies = isinstance(x, Sparse | Kernels)
        total = total + (x.counted(rule) if varies else weigh(x, rule))
    return total


def survivors(packet: Any) -> tuple[int, int]:
    """(how many are sent, of how many) of the sparse parts of a packet."""
    kept = size = 0
    for x in parts_of(packet):
        if isinstance(x, Sparse | Seeded | Kernels):
            kept += x.survivors if isinstance(x, Kernels) else x.kept
            size += x.size
    return kept, size


def bits_of(tree: Any) -> int:
    """What a tree weighs as it is."""
    return sum(8 * x.dtype.itemsize * x.size for x in jax.tree.leaves(tree))


def golomb_parameter(p: float) -> int:
    """b, of survivors that are a share p."""
    if not p:
        return 0
    ratio = math.log((math.sqrt(5) - 1) / 2) / math.log(1 - p) if p < 1 else 1 / 4
    return max(0, 1 + math.floor(math.log2(ratio)))


def golomb_mean(p: Any, b: int) -> Any:
    """Expected bits of a gap."""
    return b + 1 / (1 - (1 - p) ** (2**b))
