"""What an algorithm is: pure functions made by a factory that closes over static choices.

A round is one exchange with the cohort, for some methods two: broadcast -> local on every client ->
sums over the cohort -> update. Carried state and diagnostics are two types.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat.client.local import LocalInfo
from fedjax_flat.data.federated import ClientData

Params = Any
ServerState = Any
ClientState = Any  # () for stateless clients
Message = Any
Metrics = dict[str, jax.Array]


class ClientResult(NamedTuple):
    """What one client hands back; `delta` and `total` are its upload."""

    delta: Params  # anchor minus local model
    weight: jax.Array  # of delta in the mean over the cohort
    state: ClientState
    info: LocalInfo
    total: Any = ()  # what else is sent, summed over the cohort as it is


class Uploads(NamedTuple):
    """What the server receives from a cohort."""

    pseudo_gradient: Params  # sum(weight * delta) / sum(weight)
    delta_sum: Params  # without weights
    total: Any
    clients: jax.Array  # how many took part
    deltas: Any  # each client's, stacked, with `weights`: only if the exchange keeps them
    weights: Any


class Exchange(NamedTuple):
    """One message down and one upload back, with the cohort of the round."""

    broadcast: Callable[[ServerState, jax.Array], Message]
    local: Callable[[Message, ClientState, ClientData, jax.Array, jax.Array], ClientResult]
    update: Callable[[ServerState, Uploads, jax.Array], tuple[ServerState, Metrics]]
    keeps_deltas: bool = False


class Algorithm(NamedTuple):
    """One federated method; `models` always has the trained one under the name `global`.

    `init(params, num_clients)` is the server's state and the state with which each client starts.
    """

    init: Callable[[Params, int], tuple[ServerState, ClientState]]
    exchanges: tuple[Exchange, ...]
    models: Callable[[ServerState], dict[str, Params]]


WEIGHTINGS: dict[str, Callable[[Any], jax.Array]] = {
    "examples": lambda size: jnp.asarray(size, jnp.float32),
    "uniform": lambda size: (jnp.asarray(size) > 0).astype(jnp.float32),
}


def zeros(tree: Params) -> Params:
    """Zeros like `tree`."""
    return jax.tree.map(jnp.zeros_like, tree)


def difference(a: Params, b: Params) -> Params:
    """a - b."""
    return jax.tree.map(jnp.subtract, a, b)


def combine(a: Params, scale: Any, b: Params) -> Params:
    """a + scale b."""
    return jax.tree.map(lambda x, y: x + jnp.asarray(scale, y.dtype) * y, a, b)
