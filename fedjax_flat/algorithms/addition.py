"""What a method adds to any other: `feddyn+fedmlb` is FedDyn whose clients have FedMLB's loss.

Most of what papers do on clients is a term of the local loss, and goes with any server and any
drift correction. An addition is two functions: of the client, which then trains on another loss,
and of the algorithm, around which what the loss needs is sent or kept. What the second brings to
the client, the first finds in `data.brought` under the addition's name.

    w_k <- local training on f_k + sum of terms(w, what was brought),   the rest as it was
"""

from collections.abc import Callable
from typing import NamedTuple

from fedjax_flat import parts
from fedjax_flat.algorithms.base import Algorithm
from fedjax_flat.client import Client, Term
from fedjax_flat.data import ClientData
from fedjax_flat.models import Variables


def _as_it_is(x):
    return x


class Addition(NamedTuple):
    """Both by default leave things as they are."""

    client: Callable[[Client], Client] = _as_it_is
    around: Callable[[Algorithm], Algorithm] = _as_it_is


def added(
    make: Callable[[Client], Algorithm], client: Client, *additions: Addition
) -> Algorithm:
    """`make(client)` with these additions, the first innermost."""
    for addition in additions:
        client = addition.client(client)
    algorithm = make(client)
    for addition in additions:
        algorithm = addition.around(algorithm)
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
