"""What a method adds to any other: `feddyn+fedmlb` is FedDyn whose clients have FedMLB's loss.

Most of what papers do on clients is a term of the local loss, and goes with any server and any
drift correction. An addition is two functions: of the client, which then trains on another loss,
and of the algorithm, around which what the loss needs is sent or kept. What the second brings to
the client, the first finds in `data.brought` under the addition's name; what the first measures,
the second finds in `info.measured`.

    w_k <- local training on f_k + sum of terms(w, what was brought),   the rest as it was
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat import errors, parts
from fedjax_flat.algorithms.base import Algorithm, Exchange
from fedjax_flat.client import Client, LocalInfo, Term
from fedjax_flat.data import Batch, ClientData
from fedjax_flat.models import Outputs, Variables
from fedjax_flat.tasks import Task


class Addition(NamedTuple):
    """Both functions by default leave things as they are.

    An addition that is `innermost` changes the client before all others do: those see models as
    they are sent, whatever it lets them carry while they are trained.
    """

    client: Callable[[Client], Client] = lambda client: client
    around: Callable[[Algorithm, Task], Algorithm] = lambda algorithm, task: algorithm
    innermost: bool = False


def added(
    make: Callable[[Client], Algorithm], client: Client, *additions: Addition
) -> Algorithm:
    """`make(client)` with these additions, in their order."""
    for addition in sorted(additions, key=lambda addition: not addition.innermost):
        client = addition.client(client)
    algorithm = make(client)
    for addition in additions:
        algorithm = addition.around(algorithm, client.task)
    return algorithm


def with_term(term: Callable[[Client, Variables, ClientData], Term]) -> Callable[[Client], Client]:
    """Clients with one more term of the loss, of the model they received and their data."""

    def change(client: Client) -> Client:
        def train(variables, data, key, *, terms=(), **rest):
            anchor = parts.put(variables, data.own)
            more = term(client, anchor, data)
            return client.train(variables, data, key, terms=(*terms, more), **rest)

        return client._replace(train=train, on=lambda task: change(client.on(task)))

    return change


def shapes_of(task: Task, variables: Variables) -> Outputs:
    """The shapes of what the task's network says of one example."""
    if task.inputs is None:
        raise errors.UsageError(
            "a task that does not say what its network reads: expected Task.inputs, a tree of "
            "jax.ShapeDtypeStruct with a batch axis."
        )

    def outputs(variables):
        one = jax.tree.map(lambda s: jnp.zeros((1, *s.shape[1:]), s.dtype), task.inputs)
        return task.forward(variables, Batch(one, (), jnp.ones(1, bool)), None)

    return jax.eval_shape(outputs, variables)


class Beside(NamedTuple):
    """What an addition keeps and sends beside an algorithm; by default nothing.

    A teacher of former rounds is kept by the server and sent; a client's last model is kept by the
    client; statistics are measured, uploaded, and what the server learns of them is sent.
    """

    server: Callable[[Variables], Any] = lambda variables: ()  # what the server has at the start
    client: Callable[[Variables], Any] = lambda variables: ()  # what each client has
    send: Callable[[Any, Variables], Any] = lambda kept, model: kept
    bring: Callable[[Any, Any], Any] = lambda sent, kept: sent  # sent by server, kept by client
    keep: Callable[[Any, LocalInfo], Any] = lambda kept, info: kept  # after training
    upload: Callable[[LocalInfo], Any] = lambda info: ()  # of each client, kept apart
    learn: Callable[..., Any] = lambda kept, model, each, present: kept  # model: before the round


class BesideState(NamedTuple):
    """The algorithm's state, of the server or of a client, and what is kept beside it."""

    inner: Any
    kept: Any


def beside(algorithm: Algorithm, name: str, what: Beside) -> Algorithm:
    """`algorithm` with something kept and sent beside it, which terms find under `name`.

    Where a round has two exchanges it is sent in both, and the server learns from the last.
    """

    def init(variables, num_clients):
        server, client = algorithm.init(variables, num_clients)
        return (
            BesideState(server, what.server(variables)),
            BesideState(client, what.client(variables)),
        )

    def wrapped(part: Exchange, last: bool) -> Exchange:
        def broadcast(server, round):
            model = algorithm.models(server.inner)["global"]
            return part.broadcast(server.inner, round), what.send(server.kept, model)

        def local(message, state, data, round, key):
            inner, sent = message
            brought = {**data.brought, name: what.bring(sent, state.kept)}
            reply = part.local(inner, state.inner, data.replace(brought=brought), round, key)
            kept, each = state.kept, ()
            if jax.tree.leaves(reply.info.model):  # else nothing was trained in this exchange
                kept, each = what.keep(kept, reply.info), what.upload(reply.info)
            return reply._replace(state=BesideState(reply.state, kept), each=(reply.each, each))

        def update(server, uploads, round):
            own, each = uploads.each
            inner, metrics = part.update(server.inner, uploads._replace(each=own), round)
            kept = server.kept
            if last:
                model = algorithm.models(server.inner)["global"]
                kept = what.learn(kept, model, each, uploads.weights > 0)
            return BesideState(inner, kept), metrics

        def address(common, state, client):
            inner, sent = common
            assert part.address
            return part.address(inner, state.inner, client), sent

        return part._replace(
            broadcast=broadcast, local=local, update=update, address=part.address and address
        )

    personal = algorithm.personal
    *first, end = algorithm.exchanges
    return algorithm._replace(
        init=init,
        exchanges=(*(wrapped(part, False) for part in first), wrapped(end, True)),
        models=lambda server: algorithm.models(server.inner),
        personal=personal and (lambda server, state: personal(server.inner, state.inner)),
    )
