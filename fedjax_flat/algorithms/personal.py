"""Any algorithm in which a part of the model stays with each client.

`own` is a predicate on the names of a model's leaves (parts.py). A client keeps those between its
rounds, starting from the initial model's; it trains the whole model, with its own part merged into
whatever the server sent; and its upload says that nothing changed there, so that no server step, no
dual and no momentum ever moves a leaf that is not shared. Where everything stays, clients train by
themselves.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_flat import errors, parts
from fedjax_flat.algorithms.base import Algorithm, Exchange


class PersonalState(NamedTuple):
    """The algorithm's own state of a client, and the client's part of the model."""

    inner: Any
    own: dict[str, jax.Array]


def personal(algorithm: Algorithm, own: parts.Part) -> Algorithm:
    """`algorithm` with the leaves that `own` names kept by each client."""

    def init(variables, num_clients):
        server, client = algorithm.init(variables, num_clients)
        kept = parts.take(variables, own)
        if not kept:
            every = list(parts.take(variables, lambda name: True))
            raise errors.UsageError(
                "a personal part that owns nothing: no leaf of the model would stay with a client. "
                f"It has {', '.join(every[:4])}{', ...' if len(every) > 4 else ''}."
            )
        return server, PersonalState(client, kept)

    def model(server, state):
        inner = algorithm.personal  # of another part that stays
        shared = inner(server, state.inner) if inner else algorithm.models(server)["global"]
        return parts.put(shared, state.own)

    return algorithm._replace(
        init=init,
        exchanges=tuple(_kept(part, own) for part in algorithm.exchanges),
        personal=model,
    )


def _kept(part: Exchange, own: parts.Part) -> Exchange:
    def local(message, state, data, round, key):
        merged = data.replace(own={**data.own, **state.own})
        reply = part.local(message, state.inner, merged, round, key)
        trained = reply.info.model
        kept = parts.take(trained, own) if jax.tree.leaves(trained) else state.own
        return reply._replace(state=PersonalState(reply.state, kept))

    address = part.address
    return part._replace(
        local=local,
        address=address and (lambda common, state, client: address(common, state.inner, client)),
        own=lambda name: own(name) or bool(part.own and part.own(name)),
    )


def owned(clients: Any) -> dict[str, Any]:
    """What clients own, by name, in the state of all of them or of one."""
    found: dict[str, Any] = {}
    for x in jax.tree.leaves(clients, is_leaf=lambda x: isinstance(x, PersonalState)):
        if isinstance(x, PersonalState):
            found |= owned(x.inner) | x.own
    return found


def with_owned(clients: Any, own: dict[str, Any]) -> Any:
    """The state with these own parts, wherever it has leaves of their names."""

    def one(path, leaf):
        name = getattr(path[-1], "key", None)
        if name not in own:
            return leaf
        # A buffer of its own: state is donated, and may have a part in two places.
        return jax.device_put(np.array(own[name]), leaf.sharding)

    return jax.tree_util.tree_map_with_path(one, clients)
