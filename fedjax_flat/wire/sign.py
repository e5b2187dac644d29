"""SignSGD with majority vote: a sign for every number, up and down.

Bernstein et al., "signSGD with majority vote is communication efficient and fault tolerant" (ICLR
2019).

    client   sends sign(x_k)
    server   w <- w - step sign(sum over clients of sign(x_k)),    sends the vote

x_k is whatever the method averages, a gradient under FedSGD, a difference of models under FedAvg.
The vote weighs clients as the method does: one vote each, the paper's, is algorithm.weighting =
uniform. A number that is 0 has no vote and a draw moves nothing, so there are three symbols, five
to a byte. Both ways a sign stands for `step`, which is the paper's learning rate when the server's
is 1. On the way down what the server is ahead goes to the nearest of -step, 0 and step. Statistics
travel as they are.
"""

import jax.numpy as jnp

from fedjax_flat.wire.codec import Codec, divided, stateless
from fedjax_flat.wire.names import is_parameter
from fedjax_flat.wire.packet import Levels
from fedjax_flat.wire.stc import Packet


def sign(step: float = 0.001, accounting: str = "index") -> Codec:
    """The sign of each number; the server takes the majority."""
    down = _signs(jnp.rint, step, accounting)

    def vote(mean):
        learned, rest = divided(mean, is_parameter)
        return {**{name: step * jnp.sign(x) for name, x in learned.items()}, **rest}

    return _signs(jnp.sign, step, accounting)._replace(vote=vote, down=down)


def _signs(rounded, step: float, accounting: str) -> Codec:
    """`rounded(x / step)` as -1, 0 or 1."""

    def encode(tree, key):
        del key
        learned, rest = divided(tree, is_parameter)
        signs = lambda x: jnp.clip(rounded(x / step), -1, 1).astype(jnp.int8)
        return Packet({name: Levels(signs(x), 3, -1) for name, x in learned.items()}, rest)

    def decode(packet):
        sent = {name: step * p.values.astype(jnp.float32) for name, p in packet.sent.items()}
        return {**sent, **packet.rest}

    return stateless(encode, decode, accounting)
