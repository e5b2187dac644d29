"""Any algorithm with encoded uploads, or messages, or both.

Whatever a client hands back is encoded array by array, each once (FedDyn's differences, which the
server averages and sums, travel once), and the server works with what it decodes. What is less than
an array, a step count, travels as it is. Residuals are client state for uploads, server state for
messages.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat import rng
from fedjax_flat.algorithms.base import Algorithm, Exchange
from fedjax_flat.wire import Codec


class Compressed(NamedTuple):
    """The algorithm's own state, and a codec's for every exchange."""

    inner: Any
    codecs: tuple[Any, ...]


def compressed(
    algorithm: Algorithm, *, up: Codec | None = None, down: Codec | None = None
) -> Algorithm:
    """`algorithm` with what clients send encoded by `up`, and what they receive by `down`."""

    def init(variables, num_clients):
        server, client = algorithm.init(variables, num_clients)
        zero = jnp.int32(0)
        broadcasts = [part.broadcast(server, zero) for part in algorithm.exchanges]
        sent = tuple(_started(down, message) for message in broadcasts)
        # For codecs that keep something: of uploads that are shaped like the model, so far.
        kept = tuple(_started(up, variables) for _ in algorithm.exchanges)
        return Compressed(server, sent), Compressed(client, kept)

    exchanges = tuple(
        _encoded(part, i, up, down) for i, part in enumerate(algorithm.exchanges)
    )
    personal = algorithm.personal
    return algorithm._replace(
        init=init,
        exchanges=exchanges,
        models=lambda server: algorithm.models(server.inner),
        personal=personal and (lambda server, state: personal(server.inner, state.inner)),
    )


def _started(codec: Codec | None, tree: Any) -> Any:
    return () if codec is None else codec.init(_arrays(tree))


def _encoded(part: Exchange, i: int, up: Codec | None, down: Codec | None) -> Exchange:
    def sent(server, round):
        """(what clients decode, the server's codec state after it)."""
        message = part.broadcast(server.inner, round)
        if down is None:
            return message, server.codecs[i]
        key = jax.random.fold_in(jax.random.key(i), round)
        return through(down, message, server.codecs[i], key)

    def local(message, state, data, round, key):
        reply = part.local(message, state.inner, data, round, key)
        codecs = state.codecs
        if up is not None:
            upload = (reply.mean, reply.sum, reply.each)
            (mean, total, each), kept = through(up, upload, codecs[i], rng.fold(key, "codec"))
            reply = reply._replace(mean=mean, sum=total, each=each)
            codecs = (*codecs[:i], kept, *codecs[i + 1 :])
        return reply._replace(state=Compressed(reply.state, codecs))

    def update(server, uploads, round):
        inner, metrics = part.update(server.inner, uploads, round)
        codecs = (*server.codecs[:i], sent(server, round)[1], *server.codecs[i + 1 :])
        return Compressed(inner, codecs), metrics

    address = part.address
    weigh = lambda codec: None if codec is None else codec.bits
    return part._replace(
        broadcast=lambda server, round: sent(server, round)[0],
        local=local,
        update=update,
        address=address and (lambda common, state, client: address(common, state.inner, client)),
        bits=((weigh(down), weigh(up)),),
    )


def through(codec: Codec, tree: Any, state: Any, key: jax.Array) -> tuple[Any, Any]:
    """(`tree` after encoding and decoding its arrays, the codec's state)."""
    leaves, structure = jax.tree.flatten(tree)
    packet, state = codec.encode(_arrays(tree), state, key)
    decoded = codec.decode(packet)
    place = {id(x): str(n) for n, x in _distinct(leaves).items()}
    back = [decoded[place[id(x)]] if id(x) in place else x for x in leaves]
    return jax.tree.unflatten(structure, back), state


def _arrays(tree: Any) -> dict[str, jax.Array]:
    """What is encoded, by number."""
    return {str(n): x for n, x in _distinct(jax.tree.leaves(tree)).items()}


def _distinct(leaves: list[Any]) -> dict[int, Any]:
    """Arrays of numbers, each once: what the reductions share is sent once."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    is_sent: Callable[[Any], bool] = lambda x: jnp.issubdtype(x.dtype, jnp.floating) and x.ndim > 0
    for x in leaves:
        if is_sent(x) and id(x) not in seen:
            seen.add(id(x))
            found[len(found)] = x
    return found
