"""Codecs: what is sent instead of the numbers themselves.

`encode(tree, state, key) -> (packet, state)` and `decode(packet) -> tree`; `state` is what a sender
keeps between rounds (residuals), () for most. A tree is one model, a flat dict from names to arrays
(names.py): one codec acts on each model of a message. `bits(tree)` is what its packet weighs, from
shapes alone.

Ours but 8bit act on a model's kernels, or on all its parameters, and send the rest as it is:
biases where a codec leaves them alone, the statistics of BatchNorm always.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_flat.wire.names import Model, floating
from fedjax_flat.wire.packet import bits_of, weigh, weigh_counted


class Codec(NamedTuple):
    """Pure functions.

    `weigh(packet)` are its bits where shapes, and so `bits`, say only the most it can weigh.
    `changes`: on the way down it encodes how a message differs from what clients have, not the
    message itself. `vote`: what the server makes of the mean of what it decoded. `down`: what it is
    on the way down, if something else.
    """

    init: Callable[[Model], Any]
    encode: Callable[[Model, Any, jax.Array], tuple[Any, Any]]
    decode: Callable[[Any], Model]
    bits: Callable[[Model], int]
    weigh: Callable[[Any], jax.Array] | None = None
    changes: bool = False
    vote: Callable[[Model], Model] | None = None
    down: "Codec | None" = None


def stateless(
    encode: Callable[[Model, jax.Array], Any],
    decode: Callable[[Any], Model],
    accounting: str,
    *,
    counted: bool = False,
    changes: bool = True,
    check: Callable[[Model], None] = lambda tree: None,
) -> Codec:
    """A codec that keeps nothing, of `encode(tree, key)`; `counted` if only values say its weight.

    `check(tree)` refuses a model that it cannot encode, before anything is trained.
    """

    def init(tree):
        check(tree)
        return ()

    return Codec(
        init=init,
        encode=lambda tree, state, key: (encode(tree, key), state),
        decode=decode,
        bits=lambda tree: weigh(packet_of(encode, tree), accounting),
        weigh=(lambda packet: weigh_counted(packet, accounting)) if counted else None,
        changes=changes,
    )


def packet_of(encode: Callable[[Model, jax.Array], Any], tree: Model) -> Any:
    """The shapes of a tree's packet."""
    return jax.eval_shape(lambda t: encode(t, jax.random.key(0)), tree)


def bits_sent(bits: Callable[[Model], int] | None, model: Model) -> int:
    """What one model of a message weighs: by a codec's `bits`, or as it is."""
    coded = floating(model) if bits else {}
    rest = {name: x for name, x in model.items() if name not in coded}
    return bits_of(rest) + (bits(coded) if bits and coded else 0)


def divided(tree: Model, part: Callable[[str, Any], bool]) -> tuple[Model, Model]:
    """(the leaves of a part, the rest)."""
    chosen = {name: x for name, x in tree.items() if part(name, x)}
    return chosen, {name: x for name, x in tree.items() if name not in chosen}


def joined(arrays: Model) -> jax.Array:
    """One vector, in the order of the names."""
    return jnp.concatenate([x.reshape(-1) for x in arrays.values()])


def parted(vector: jax.Array, like: Model) -> Model:
    """The arrays of a vector, as `like` has them."""
    ends = np.cumsum([x.size for x in like.values()])[:-1].tolist()
    pieces = zip(jnp.split(vector, ends), like.items(), strict=True)
    return {name: piece.reshape(x.shape) for piece, (name, x) in pieces}
