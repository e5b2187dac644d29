"""Any algorithm with encoded uploads, or messages, or both.

Whatever a client hands back is encoded model by model, each array once, and the server works with
what it decodes. A part that stays with clients is left alone.

    up     u_k = decode(encode(x_k)),   x_k the client's upload
    down   8bit, rotation:   clients receive decode(encode(m)),   m the message
           all others:       the server steps by decode(encode(mean of u_k)), and clients with it

The second way down is that of Sattler et al. (2020; Mora 2023, 3.1): with STC, error feedback on
both sides and FedAvg it is their bidirectional protocol,

    client   a = Delta_k + r_k,        u_k = STC(a),   r_k <- a - u_k
    server   A = mean of u_k + R,      U = STC(A),     R <- A - U,      w <- w + U,   sends U

Clients hold the server's state, which is the model if its optimiser is SGD, and repeat its step:
what the step depends on, the mean and the sum of the uploads, is all that they need. A method whose
server looks at every upload by itself has no such way down.

Residuals of clients are client state, shaped as the uploads are; for that, `data` shows what a
client's data look like. The server's are server state. With `cache` tau the server keeps sums of
its last tau updates: a client that lacks s of them downloads their sum, counted as if survivors of
different rounds lay apart, and the whole message if s > tau. What shapes do not say is counted as
the metrics `bytes_down` and `bytes_up` (Counted).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat import errors, parts, rng
from fedjax_flat.algorithms.base import Algorithm, Exchange, Upload, one_exchange
from fedjax_flat.data import ClientData
from fedjax_flat.wire import Codec, Model, models_in, replaced, shapes_of
from fedjax_flat.wire.cache import catch_up
from fedjax_flat.wire.message import bits_in, started, through


class CompressedServer(NamedTuple):
    """The algorithm's own state, and the codec's for every exchange."""

    inner: Any
    codecs: tuple[Any, ...]


class CompressedClient(NamedTuple):
    """The same of a client, and the round in which it last took part, where that is counted."""

    inner: Any
    codecs: tuple[Any, ...]
    last: Any


class Step(NamedTuple):
    """What the server's step depends on."""

    mean: Any
    sum: Any


class Counted(NamedTuple):
    """A reply's sum, and what the client received and sent.

    Bytes are (multiples of 65536, the rest): two numbers that stay exact when they are summed.
    """

    sum: Any
    bytes: dict[str, tuple[jax.Array, jax.Array]]


def compressed(
    algorithm: Algorithm,
    *,
    up: Codec | None = None,
    down: Codec | None = None,
    data: ClientData | None = None,
    cache: int = 0,
    seed: int = 0,
) -> Algorithm:
    """`algorithm` with what clients send encoded by `up`, and what they receive by `down`.

    Without `data`, uploads of codecs with a state are taken to be shaped like the model.
    """
    if down is not None and down.down is not None:
        down = down.down
    if cache and not (down and down.changes):
        raise errors.UsageError(
            f"wire.cache = {cache}: the server would keep sums of its last updates, but it sends "
            "models. Choose a wire.down that encodes updates, e.g. stc."
        )
    last = len(algorithm.exchanges) - 1
    wires = [
        _Wire(part, i, i == last, up, down, cache, seed)
        for i, part in enumerate(algorithm.exchanges)
    ]

    def init(variables, num_clients):
        server, client = algorithm.init(variables, num_clients)
        starts = [wire.init(server, client, variables, data) for wire in wires]
        never = jnp.int32(0) if cache else ()  # all have the first model
        of_server, of_client = zip(*starts, strict=True)
        return CompressedServer(server, of_server), CompressedClient(client, of_client, never)

    personal = algorithm.personal
    return algorithm._replace(
        init=init,
        exchanges=tuple(wire.exchange() for wire in wires),
        models=lambda server: algorithm.models(server.inner),
        personal=personal and (lambda server, state: personal(server.inner, state.inner)),
    )


class _Wire(NamedTuple):
    """One exchange, and what it passes through."""

    part: Exchange
    i: int
    is_last: bool
    up: Codec | None
    down: Codec | None
    cache: int
    seed: int

    @property
    def step(self) -> Codec | None:
        """The codec of the server's step, if that is what travels down."""
        return self.down if self.down and self.down.changes else None

    @property
    def counted(self) -> bool:
        """Whether shapes leave open what is received or sent."""
        weighed = [codec for codec in (self.up, self.step) if codec and codec.weigh]
        return bool(self.cache or weighed)

    def exchange(self) -> Exchange:
        """With all that is sent encoded."""
        address = self.part.address
        return self.part._replace(
            broadcast=self.broadcast,
            local=self.local,
            update=self.update,
            address=address and (lambda all_, state, client: address(all_, state.inner, client)),
            bits=(self.bits,),
        )

    def init(self, server, client, variables, data) -> tuple[Any, Any]:
        """The codecs' states before the first round: the server's, a client's."""
        part, upload = self.part, Upload(variables, (), ())
        kept = [started(codec, upload, part.own) for codec in (self.up, self.step)]
        if data is not None and (self.step or any(kept)):
            exchanged = functools.partial(one_exchange, part)
            _, upload = shapes_of(exchanged, server, client, data, jax.random.key(0))
            if self.step:
                refuse_each(upload)
        sent: Any = part.broadcast(server, jnp.int32(0))
        if self.step:  # means and sums of what is sent once are two
            shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
            sent = jax.tree.map(shape, Step(upload.mean, upload.sum))
        return started(self.down, sent, part.own), started(self.up, upload, part.own)

    def broadcast(self, server, round):
        message = self.part.broadcast(server.inner, round)
        return message if self.step or not self.down else self.sent(server, message, round)[0]

    def sent(self, server, tree, round):
        """What the server encodes: `through` its codec."""
        assert self.down
        key = rng.fold(jax.random.key(self.seed), "down", self.i, round)
        return through(self.down, tree, self.part.own, server.codecs[self.i], key)

    def local(self, message, state, data, round, key):
        reply = self.part.local(message, state.inner, data, round, key)
        upload, codecs, found = Upload(reply.mean, reply.sum, reply.each), state.codecs, {}
        if self.step and self.cache:
            models = (self.models(message), self.models(upload.mean) + self.models(upload.sum))
            costs = jnp.asarray(catch_up(self.cache, self.step, *models), jnp.int32)
            found["bytes_down"] = costs[jnp.minimum(round - state.last, self.cache + 1)]
        if self.up:
            upload, kept, bits = through(
                self.up, upload, self.part.own, codecs[self.i], rng.fold(key, "codec", self.i)
            )
            codecs = self.with_state(codecs, kept)
            if self.up.weigh:
                found["bytes_up"] = -(-bits // 8)
        total: Any = upload.sum
        if self.counted:
            total = Counted(total, {name: halves(n) for name, n in found.items()})
        last = round if self.cache and self.is_last else state.last
        return reply._replace(
            mean=upload.mean, sum=total, each=upload.each,
            state=CompressedClient(reply.state, codecs, last),
        )

    def update(self, server, uploads, round):
        metrics, codecs = {}, server.codecs
        if self.counted:
            metrics = {name: jnp.stack(two) for name, two in uploads.sum.bytes.items()}
            uploads = uploads._replace(sum=uploads.sum.sum)
        if self.up and self.up.vote:
            means = models_in(uploads.mean, self.part.own)
            votes = {place: self.up.vote(model) for place, model in means.items()}
            uploads = uploads._replace(mean=replaced(uploads.mean, means, votes))
        if self.step:
            refuse_each(uploads)
            step, kept, bits = self.sent(server, Step(uploads.mean, uploads.sum), round)
            uploads, codecs = uploads._replace(**step._asdict()), self.with_state(codecs, kept)
            if self.step.weigh and not self.cache:
                two = jnp.stack(halves(-(-bits // 8)))
                metrics["bytes_down"] = uploads.clients.astype(jnp.int32) * two
        elif server.codecs[self.i]:
            message = self.part.broadcast(server.inner, round)
            codecs = self.with_state(codecs, self.sent(server, message, round)[1])
        inner, own = self.part.update(server.inner, uploads, round)
        return CompressedServer(inner, codecs), {**own, **metrics}

    def with_state(self, codecs: tuple[Any, ...], kept: Any) -> tuple[Any, ...]:
        """The codecs' states with this exchange's."""
        return (*codecs[: self.i], kept, *codecs[self.i + 1 :])

    def models(self, tree: Any) -> list[Model]:
        """What travels of a tree."""
        return list(models_in(tree, self.part.own).values())

    def bits(self, message: Any, upload: Upload, own: parts.Part | None) -> tuple[int, int]:
        """What a client receives and sends, from shapes."""
        received = (upload.mean, upload.sum) if self.step else (message,)
        down = sum(bits_in(self.down, tree, own) for tree in received)
        return down, bits_in(self.up, upload, own)


def halves(n: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(multiples of 65536, the rest)."""
    return n >> 16, n & 0xFFFF


def refuse_each(uploads: Any) -> None:
    """Of a server that looks at every upload, clients cannot repeat the step."""
    if jax.tree.leaves(uploads.each):
        raise errors.UsageError(
            "wire.down encodes the server's step, which clients repeat; this method's server looks "
            "at every client's upload, which they do not have. Choose wire.down = 8bit."
        )
