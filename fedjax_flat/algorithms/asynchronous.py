"""Clients that are not waited for: FedAsync and FedBuff, of FedAvg with whatever is added to it.

Xie et al., "Asynchronous federated optimization" (OPT 2020); Nguyen et al., "Federated learning
with buffered asynchronous aggregation" (AISTATS 2022). Client k was sent the model w_tau and comes
back with w_k when the server's is w_t; d = t - tau is its staleness.

    FedAsync   w <- (1 - a) w + a w_k,   a = alpha s(d), at every arrival
    FedBuff    w <- SERVEROPT(w, mean over the buffer of s(d) (w_tau - w_k)), when it is full

    s(d)       constant: 1    polynomial: (d + 1)^-a    hinge: 1 if d <= b, else 1 / (a (d - b) + 1)

A round is one step of the server and its cohort are the clients that came back, in the order of the
clock (engine/clock.py), by which the server keeps the messages of those that are out: as many
models as there are clients in flight. A client is trained when it comes back, on what it was sent,
with the learning rate of that round. FedAsync counts at arrivals of more than one (cohort.size > 1)
the mean of their steps. In the paper clients have a proximal term: fedprox+fedasync.

The mean is over the number of uploads, weighted as algorithm.weighting says, and not over the sum
of s: staleness shortens the step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_flat import errors
from fedjax_flat.algorithms.addition import Addition
from fedjax_flat.algorithms.base import Algorithm, difference
from fedjax_flat.algorithms.method import Method
from fedjax_flat.algorithms.robust import only_mean
from fedjax_flat.server import aggregate
from fedjax_flat.settings import Setting

Discount = Callable[[jax.Array], jax.Array]


class Flights(NamedTuple):
    """The arrivals of every server step, in their order: arrays of (rounds, arrivals)."""

    clients: np.ndarray
    slot: np.ndarray  # where the message that a client was sent is kept
    staleness: np.ndarray  # steps that the server took meanwhile
    seconds: np.ndarray  # (rounds,): since the step before
    slots: int


class Flying(NamedTuple):
    """The algorithm's own state, and the messages of the clients that are out, by slot."""

    inner: Any
    sent: Any


def discount(kind: str, a: float = 0.5, b: float = 4.0) -> Discount:
    """s(d), by name."""
    errors.at_least("a", a, 0)
    errors.at_least("b", b, 0)
    one = jnp.float32(1)
    return errors.lookup("staleness", kind, {
        "constant": lambda d: jnp.ones_like(d, jnp.float32),
        "polynomial": lambda d: (d.astype(jnp.float32) + one) ** jnp.float32(-a),
        "hinge": lambda d: one / (a * jnp.maximum(d.astype(jnp.float32) - b, 0.0) + one),
    })


def asynchronous(
    algorithm: Algorithm, flights: Flights, s: Discount, *, alpha: float | None = None
) -> Algorithm:
    """FedAvg's `algorithm` under these flights, FedBuff; with `alpha`, FedAsync.

    The cohort of a round must be flights.clients[round], in that order.
    """
    if alpha is not None:
        errors.positive("alpha", alpha)
    if len(algorithm.exchanges) > 1:
        raise errors.UsageError(
            "a method of two exchanges per round: clients that are not waited for send one upload. "
            "Choose a method with one, e.g. fedavg."
        )
    (part,) = algorithm.exchanges
    clients, slots = jnp.asarray(flights.clients), jnp.asarray(flights.slot)
    stale, seconds = jnp.asarray(flights.staleness), jnp.asarray(flights.seconds, jnp.float32)
    at = lambda array, round: array[jnp.minimum(round, len(array) - 1)]
    by = s if alpha is None else lambda d: alpha * s(d)

    def init(variables, num_clients):
        server, client = algorithm.init(variables, num_clients)
        message = part.broadcast(server, jnp.int32(0))
        many = lambda x: jnp.broadcast_to(x, (flights.slots, *jnp.shape(x)))
        return Flying(server, jax.tree.map(many, message)), client

    def broadcast(server, round):
        now = part.broadcast(server.inner, round)
        return now, server.sent, at(clients, round), at(slots, round), at(stale, round)

    def address(common, state, client):
        now, sent, who, slot, late = common
        i = jnp.argmax(who == client)
        # Sent out since the last step: the slot still has what its last client received.
        old = jax.tree.map(lambda x: x[slot[i]], sent)
        message = jax.tree.map(lambda a, b: jnp.where(late[i] == 0, a, b), now, old)
        return part.address(message, state, client) if part.address else message

    def local(message, state, data, round, key):
        reply = only_mean(part.local(message, state, data, round, key), "asynchronous clients")
        i = jnp.argmax(at(clients, round) == data.client)
        upload = reply.mean if alpha is None else reply.info.model
        return reply._replace(mean=aggregate.weighted(upload, by(at(stale, round)[i])))

    def update(server, uploads, round):
        slot, late = at(slots, round), at(stale, round)
        mean = uploads.mean
        if alpha is not None:  # from mean of a w_k to that of a (w - w_k)
            a = aggregate.mean_of(by(late), uploads.weights[: late.shape[0]])
            model = algorithm.models(server.inner)["global"]
            mean = difference(aggregate.weighted(model, a), mean)
        inner, metrics = part.update(server.inner, uploads._replace(mean=mean), round)
        before, after = part.broadcast(server.inner, round), part.broadcast(inner, round + 1)
        *early, last = range(slot.shape[0])
        sent = server.sent
        if early:  # whoever took their place went out with the model of before
            kept = slot[jnp.asarray(early)]
            sent = jax.tree.map(lambda x, new: x.at[kept].set(new), sent, before)
        sent = jax.tree.map(lambda x, new: x.at[slot[last]].set(new), sent, after)
        measured = {"seconds": at(seconds, round), "staleness": jnp.mean(late.astype(jnp.float32))}
        return Flying(inner, sent), {**metrics, **measured}

    return algorithm._replace(
        init=init,
        exchanges=(part._replace(
            broadcast=broadcast, address=address, local=local, update=update
        ),),
        models=lambda server: algorithm.models(server.inner),
    )


_SHARED = {
    "in_flight": Setting(10, "clients that train at any time", at_least=1),
    "a": Setting(0.5, "of polynomial and hinge: how steep", at_least=0),
    "b": Setting(4.0, "of hinge: the staleness that costs nothing", at_least=0),
}
_KINDS = ("constant", "polynomial", "hinge")


def _staleness(kind: str) -> Setting:
    return Setting(kind, "s(d): how late uploads count", choices=_KINDS)


METHOD = (
    Method(
        "fedasync", "Xie 2020", "a step at every arrival, less if late",
        add=lambda settings: Addition(),  # by the experiment, which has the clock
        settings={
            "alpha": Setting(0.6, "how far towards a model that is not late", above=0, at_most=1),
            "staleness": _staleness("polynomial"), **_SHARED,
        },
    ),
    Method(
        "fedbuff", "Nguyen 2022", "a step at every so many arrivals",
        add=lambda settings: Addition(),
        settings={"staleness": _staleness("polynomial"), **_SHARED},
    ),
)
