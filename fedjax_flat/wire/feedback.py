"""Error feedback: what a packet leaves out is added to the next one.

Seide et al., "1-bit stochastic gradient descent" (Interspeech 2014); Stich et al., "Sparsified SGD
with memory" (NeurIPS 2018).

    a = x + r,    sent: y = decode(encode(a)),    r <- a - y

so that what was sent and what is kept add up to all updates. It asks that y is closer to a than 0
is: true of top-k, STC and 8 bits; QSGD with few levels and a mask that is made unbiased are not.
"""

import jax
import jax.numpy as jnp

from fedjax_flat.wire.codec import Codec


def feedback(codec: Codec) -> Codec:
    """`codec` with a residual as its state, beside the codec's own."""

    def init(tree):
        return codec.init(tree), jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)

    def encode(tree, state, key):
        own, residual = state
        whole = jax.tree.map(jnp.add, tree, residual)
        packet, own = codec.encode(whole, own, key)
        return packet, (own, jax.tree.map(jnp.subtract, whole, codec.decode(packet)))

    return codec._replace(init=init, encode=encode)
