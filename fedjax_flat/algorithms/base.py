"""What an algorithm is: five pure functions made by a factory that closes over static choices.

A round is broadcast -> local on every client of the cohort -> weighted mean of the uploads ->
update. Carried state and diagnostics are two types.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fedjax_flat.client.local import LocalInfo
from fedjax_flat.data.federated import ClientData

Params = Any
ServerState = Any
ClientState = Any  # () for stateless clients; otherwise stacked over all K clients
Message = Any
Upload = Any


class ClientResult(NamedTuple):
    """What one client hands back; the aggregate is sum(weight * upload) / sum(weight)."""

    upload: Upload
    weight: jax.Array
    state: ClientState
    info: LocalInfo


class Algorithm(NamedTuple):
    """One federated method."""

    init: Callable[[Params, int], tuple[ServerState, ClientState]]
    broadcast: Callable[[ServerState], Message]
    local: Callable[[Message, ClientState, ClientData, jax.Array, jax.Array], ClientResult]
    update: Callable[[ServerState, Upload], ServerState]
    models: Callable[[ServerState], dict[str, Params]]
