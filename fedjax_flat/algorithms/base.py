"""What an algorithm is: pure functions made by a factory that closes over static choices.

A round is one exchange with the cohort, for some methods two: broadcast -> local on every client ->
reductions over the cohort -> update. Models are `Variables`; what is measured in them (statistics)
is averaged like parameters and no optimiser sees it. Carried state and diagnostics are two types.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_flat import errors, parts
from fedjax_flat.client.local import LocalInfo
from fedjax_flat.data import ClientData
from fedjax_flat.models import Variables

ServerState = Any
ClientState = Any  # () for stateless clients
Message = Any
Metrics = dict[str, jax.Array]


class Reply(NamedTuple):
    """What one client hands back: its new state, and an upload in three reductions."""

    state: ClientState
    info: LocalInfo
    weight: jax.Array  # of `mean`
    present: jax.Array  # whether it took part: else nothing of it counts, and its state stays
    mean: Any = ()  # averaged over the cohort with the weights
    sum: Any = ()  # summed as it is
    each: Any = ()  # kept apart: stacked over the cohort
    kind: Any = 0  # which of the exchange's `bits` count its messages


class Upload(NamedTuple):
    """What of a reply travels."""

    mean: Any
    sum: Any
    each: Any


# (message, upload, own) -> bits down and up, of shapes
Weigh = Callable[[Any, Upload, parts.Part | None], tuple[int, int]]


class Uploads(NamedTuple):
    """What the server receives from a cohort; zeros where nobody took part."""

    mean: Any  # sum(weight * mean) / sum(weight)
    sum: Any
    each: Any
    weights: jax.Array  # one per member of the cohort, 0 for those that are absent
    clients: jax.Array  # how many took part
    unlabelled: Any = None  # no upload: inputs of examples that the server itself has
    labelled: Any = None  # nor this: examples that it has, labels and all


class Exchange(NamedTuple):
    """One message down and one upload back, with the cohort of the round.

    `address(common, state, client)` is what one client receives of what is broadcast, by default
    all of it. What is sent is counted from shapes, without leaves that are `own`, and as it is
    unless `bits` has functions of (message, upload, own) that say what travels down and up: one for
    every kind of client, where clients differ in what they receive and send.
    """

    broadcast: Callable[[ServerState, jax.Array], Any]
    local: Callable[[Message, ClientState, ClientData, jax.Array, jax.Array], Reply]
    update: Callable[[ServerState, Uploads, jax.Array], tuple[ServerState, Metrics]]
    address: Callable[[Any, ClientState, jax.Array], Message] | None = None
    own: parts.Part | None = None
    bits: tuple[Weigh | None, ...] = (None,)


class Algorithm(NamedTuple):
    """One federated method; `models` always has the trained one under the name `global`.

    `init(variables, num_clients)` is the server's state and the state with which each client
    starts. `personal(server, state)` is the model of one client, where clients have their own.
    `advice` is for whoever sees it turn non-finite.
    """

    init: Callable[[Variables, int], tuple[ServerState, ClientState]]
    exchanges: tuple[Exchange, ...]
    models: Callable[[ServerState], dict[str, Variables]]
    personal: Callable[[ServerState, ClientState], Variables] | None = None
    advice: str = (
        "Try a smaller client.learning_rate or server.learning_rate, or --config.debug=True to see "
        "the client, step and tensor."
    )


def one_exchange(
    part: Exchange, server: ServerState, state: ClientState, data: ClientData, key: jax.Array
) -> tuple[Message, Upload]:
    """What one client would receive and send in the first round; for shapes."""
    zero = jnp.int32(0)
    message = part.broadcast(server, zero)
    if part.address:
        message = part.address(message, state, zero)
    reply = part.local(message, state, data, zero, key)
    return message, Upload(reply.mean, reply.sum, reply.each)


_WEIGHTS: dict[str, Callable[[Any], jax.Array]] = {
    "examples": lambda size: jnp.asarray(size, jnp.float32),
    "uniform": lambda size: (jnp.asarray(size) > 0).astype(jnp.float32),
}
WEIGHTINGS = tuple(_WEIGHTS)


def replies(weighting: str) -> Callable[..., Reply]:
    """`reply(data, state, info, mean=..., sum=..., each=...)`, clients weighted as asked."""
    weigh = errors.lookup("weighting", weighting, _WEIGHTS)

    def reply(data: ClientData, state: ClientState, info: LocalInfo, **upload: Any) -> Reply:
        return Reply(state, info, weigh(data.size), jnp.asarray(data.size) > 0, **upload)

    return reply


def without_traffic(algorithm: Algorithm, part: parts.Part | None) -> Algorithm:
    """The same, where what is in this part never changes and so is never sent."""
    still = lambda exchange: exchange._replace(own=parts.either(exchange.own, part))
    return algorithm._replace(exchanges=tuple(map(still, algorithm.exchanges)))


zeros = optax.tree.zeros_like  # of a tree
difference = optax.tree.sub  # a - b
combine = optax.tree.add_scale  # a, scale, b: a + scale b
