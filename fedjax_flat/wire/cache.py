"""What a client downloads that was away: the server keeps sums of its last updates.

Sattler et al. (2020), as in Mora (2023), 3.1. A client that lacks s <= tau updates receives their
sum, one that lacks more the whole message. The sum of s updates of n survivors each is counted as
min(s n, size) survivors, as if those of different rounds lay apart, each at the price of one
update's, all else of an update included; that a sum has several magnitudes is not counted.
"""

import jax

from fedjax_flat import errors
from fedjax_flat.wire.codec import Codec
from fedjax_flat.wire.names import Model, floating
from fedjax_flat.wire.packet import bits_of, survivors


def catch_up(tau: int, codec: Codec, message: list[Model], update: list[Model]) -> list[int]:
    """Bytes for a client that lacks 0, 1, .. tau updates, and for one that lacks more."""
    kept = size = bits = 0
    for model in map(floating, update):
        encode = lambda m: codec.encode(m, codec.init(m), jax.random.key(0))[0]
        found = survivors(jax.eval_shape(encode, model))
        kept, size, bits = kept + found[0], size + found[1], bits + codec.bits(model)
    if not kept:
        raise errors.UsageError(
            "wire.cache counts survivors, and wire.down leaves none out: all of an update travels. "
            "Choose stc, or leave the cache out."
        )
    sums = [catch_up_bits(s, bits, kept, size) for s in range(tau + 1)]
    return [-(-b // 8) for b in (*sums, bits_of(message))]


def catch_up_bits(s: int, update: int, kept: int, size: int) -> int:
    """The sum of s updates, of `kept` survivors of `size` and `update` bits each."""
    return -(-update * min(s * kept, size) // max(kept, 1))
