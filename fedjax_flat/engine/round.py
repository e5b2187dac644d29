"""A federated round as one pure function, and several of them in one dispatch."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_flat import debug, parts, rng
from fedjax_flat.algorithms.base import Algorithm, Exchange, Uploads, one_exchange
from fedjax_flat.data import ClientData, FederatedData
from fedjax_flat.engine import client_state, sampling
from fedjax_flat.engine.cohort import CohortMap
from fedjax_flat.engine.sampling import Sampler
from fedjax_flat.models import Variables
from fedjax_flat.server import Average, aggregate
from fedjax_flat.tasks import Task
from fedjax_flat.wire import bits_of, models_in, shapes_of


class TrainState(NamedTuple):
    """Everything a round needs and everything a checkpoint holds."""

    round: jax.Array
    key: jax.Array
    server: Any
    clients: Any
    averages: dict[str, Any]  # by name, beside the model that is trained
    previous: Any  # how the model moved in the last round, if its angle to the next is asked for


class RoundInfo(NamedTuple):
    """What happened in a round, over the clients that took part."""

    report: dict[str, jax.Array]  # the task's, over the units visited, before each step
    drift: jax.Array  # mean over clients
    norm: jax.Array  # of the global model, after the round
    examples: jax.Array  # visited, so an example counts once per local epoch
    clients: jax.Array
    kinds: jax.Array  # how many clients of each kind (algorithms.base.Exchange.bits)
    links: jax.Array  # models that clients handed on to each other, in groups
    finite: jax.Array
    metrics: dict[str, jax.Array]  # what the method itself measures, and the cosine if asked


# Counted where shapes do not say it (see algorithms/compressed.py): (multiples of 65536, the rest).
BYTES = ("bytes_down", "bytes_up")

CohortOf = Callable[[jax.Array, jax.Array], sampling.Cohort]
RoundStep = Callable[[TrainState, FederatedData], tuple[TrainState, RoundInfo]]


Averages = Mapping[str, Average]
NO_AVERAGES: Averages = {}


def init_state(
    algorithm: Algorithm,
    variables: Variables,
    num_clients: int,
    key: jax.Array,
    averages: Averages = NO_AVERAGES,
    client_state_in: str = "device",
    *,
    cosine: bool = False,
) -> TrainState:
    """The state before the first round; the clients' is kept on the `device` or the `host`.

    With `cosine`, which `round_step` needs too, rounds measure the angle between consecutive moves
    of the global model, at the price of one more model in the state.
    """
    server, row = algorithm.init(variables, num_clients)
    clients = client_state.stacked(row, num_clients, client_state_in)
    server = jax.tree.map(jnp.copy, server)  # a donated buffer may occur only once
    model = algorithm.models(server)["global"]
    started = {name: average.init(model) for name, average in averages.items()}
    previous = optax.tree.zeros_like(variables.params) if cosine else ()
    return TrainState(jax.device_put(np.int32(0)), key, server, clients, started, previous)


class _Exchanged(NamedTuple):
    server: Any
    rows: Any
    uploads: Uploads
    kinds: jax.Array
    sums: Any
    drift: jax.Array
    links: jax.Array
    metrics: dict[str, jax.Array]
    models: Any


def _exchange(
    cohort_map: CohortMap, part: Exchange, state: TrainState, server, rows, cohort, data, *,
    keep_models: bool = False,
) -> _Exchanged:
    """One message down and the uploads back."""

    def work(shared, member):
        common, data, round, key = shared
        (k, mask), row, slot = member
        client_key = rng.fold(key, "client", round, k)
        message = part.address(common, row, k) if part.address else common
        own = data.client(k, mask).replace(slot=slot)
        if own.group is not None:
            client_key = rng.fold(key, "group", round, k)
            group = own.group._replace(key=rng.fold(key, "client", round))
            own = own.replace(group=group.shuffled(rng.fold(client_key, "order")))
        reply = part.local(message, row, own, round, client_key)
        there = reply.present.astype(jnp.float32)
        weight = there * reply.weight
        kind = there * (jnp.arange(len(part.bits)) == reply.kind).astype(jnp.float32)
        if_present = lambda x: jnp.where(reply.present, x, jnp.zeros_like(x))
        summed = (
            aggregate.weighted(jax.tree.map(if_present, reply.mean), weight),
            weight,
            jax.tree.map(if_present, reply.sum),
            (reply.info.sums, kind, there * reply.info.drift, there * _links(own)),
        )
        # A client that takes no part keeps its state.
        row = jax.tree.map(lambda new, old: jnp.where(reply.present, new, old), reply.state, row)
        each = jax.tree.map(if_present, reply.each)
        return summed, (row, each, weight, reply.info.model if keep_models else ())

    common = part.broadcast(server, state.round)
    summed, (rows, each, weights, models) = cohort_map.run(
        work, (common, data, state.round, state.key),
        (cohort, rows, jnp.arange(cohort.clients.shape[0], dtype=jnp.int32)),
    )
    weighted_sum, weight, total, (sums, kinds, drift, links) = summed
    clients = jnp.sum(kinds)
    mean = aggregate.mean(weighted_sum, weight)
    uploads = Uploads(mean, total, each, weights, clients, data.unlabelled, data.labelled)
    debug.check({"aggregate": (uploads.mean, uploads.sum)}, round=state.round)
    updated, metrics = part.update(server, uploads, state.round)
    # A round in which nobody took part changes nothing.
    server = jax.tree.map(lambda new, old: jnp.where(clients > 0, new, old), updated, server)
    return _Exchanged(server, rows, uploads, kinds, sums, drift, links, metrics, models)


def _links(data: ClientData) -> jax.Array:
    """How often a group's clients hand the model on; never, of a client by itself."""
    if data.group is None:
        return jnp.zeros((), jnp.float32)
    return jnp.maximum(data.passes * data.group.length - 1, 0).astype(jnp.float32)


def cohorts(sample: Sampler, cohort_map: CohortMap) -> CohortOf:
    """`cohort_of(key, round)`: who takes part, in a number that the devices can share."""
    return lambda key, round: sampling.pad(sampling.draw(sample, key, round), cohort_map.multiple)


def _one_group(
    cohort: sampling.Cohort, data: FederatedData, multiple: int
) -> tuple[sampling.Cohort, FederatedData]:
    """The clients of a cohort as one group, the only member."""
    clients = cohort.clients
    if cohort.mask is not None:  # who is there comes first
        order = jnp.argsort(~cohort.mask)
        clients = jnp.where(cohort.mask, clients, -1)[order]
    return (
        sampling.pad(sampling.Cohort(jnp.zeros(1, jnp.int32), None), multiple),
        data.replace(groups=clients[None]),
    )


def round_step(
    algorithm: Algorithm,
    sample: Sampler,
    cohort_map: CohortMap,
    averages: Averages = NO_AVERAGES,
    *,
    task: Task,
    cosine: bool = False,
    chained: bool = False,
) -> RoundStep:
    """One round: sample, broadcast, train locally, aggregate, update, average.

    If `chained`, the round's clients are one group, which is the whole cohort.
    """
    cohort_of = cohorts(sample, cohort_map)

    def step(state: TrainState, data: FederatedData) -> tuple[TrainState, RoundInfo]:
        cohort = cohort_of(state.key, state.round)
        if chained:
            cohort, data = _one_group(cohort, data, cohort_map.multiple)
        server = state.server
        rows = client_state.gather(state.clients, cohort)
        metrics: dict[str, jax.Array] = {}
        for part in algorithm.exchanges:
            done = _exchange(cohort_map, part, state, server, rows, cohort, data)
            server, rows = done.server, done.rows
            counts = {n: metrics[n] + done.metrics[n] for n in BYTES if n in metrics}
            metrics |= done.metrics | counts
        model = algorithm.models(server)["global"]
        previous: Any = ()
        if cosine:
            before = algorithm.models(state.server)["global"]
            previous = optax.tree.sub(before.params, model.params)
            metrics["cosine"] = cosine_between(previous, state.previous)
        report = task.means(done.sums)
        info = RoundInfo(
            report=report,
            drift=done.drift / jnp.maximum(done.uploads.clients, 1),
            norm=optax.tree.norm(model.params),
            examples=done.sums["examples"],
            clients=done.uploads.clients,
            kinds=done.kinds,
            links=done.links,
            finite=all_finite((report["loss"], server)),
            metrics=metrics,
        )
        state = TrainState(
            round=state.round + 1,
            key=state.key,
            server=server,
            clients=cohort_map.share(client_state.scatter(state.clients, cohort, rows)),
            averages={
                name: average.update(state.averages[name], model, state.round)
                for name, average in averages.items()
            },
            previous=previous,
        )
        return state, info

    return step


def local_models(
    algorithm: Algorithm, cohort_map: CohortMap
) -> Callable[[TrainState, FederatedData, jax.Array], Any]:
    """`models(state, data, clients)`: those with which these clients would end the next round.

    Stacked, before aggregation, as if the clients were the cohort; () where none are trained.
    """

    def models(state, data, clients):
        cohort = sampling.pad(sampling.Cohort(clients, None), cohort_map.multiple)
        server, rows = state.server, client_state.gather(state.clients, cohort)
        for part in algorithm.exchanges:
            done = _exchange(
                cohort_map, part, state, server, rows, cohort, data, keep_models=True
            )
            server, rows = done.server, done.rows
        return jax.tree.map(lambda x: x[: clients.shape[0]], done.models)

    return models


def cosine_between(a: Any, b: Any) -> jax.Array:
    """Of the angle between two trees; 0 when one of them is zero."""
    lengths = optax.tree.norm(a) * optax.tree.norm(b)
    return jnp.where(lengths > 0, optax.tree.vdot(a, b) / jnp.where(lengths > 0, lengths, 1), 0.0)


def models(
    algorithm: Algorithm, state: TrainState, averages: Averages = NO_AVERAGES
) -> dict[str, Any]:
    """The trained models by name, and the averages that hold one already."""
    trained = algorithm.models(state.server)
    done = int(state.round)
    return trained | {
        name: average.model(state.averages[name], trained["global"])
        for name, average in averages.items()
        if done >= average.first
    }


def all_finite(tree: Any) -> jax.Array:
    """Whether every floating leaf is finite."""
    checks = [
        jnp.all(jnp.isfinite(x))
        for x in jax.tree.leaves(tree)
        if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    return jnp.all(jnp.stack(checks))


def many_rounds(step: RoundStep, most: int) -> Callable[..., tuple[TrainState, RoundInfo]]:
    """`run(state, data, n)`: n <= `most` rounds in one dispatch, their infos stacked.

    n is an argument, not a shape, so any number of rounds uses the same executable; rows of the
    infos past n are zero.
    """

    def run(state, data, n):
        shapes = jax.eval_shape(step, state, data)[1]
        infos = jax.tree.map(lambda s: jnp.zeros((most, *s.shape), s.dtype), shapes)

        def body(i, carry):
            state, infos = carry
            state, info = step(state, data)
            return state, jax.tree.map(lambda buffer, x: buffer.at[i].set(x), infos, info)

        return jax.lax.fori_loop(0, n, body, (state, infos))

    return run


def as_they_are(message: Any, upload: Any, own: parts.Part | None) -> tuple[int, int]:
    """The bits of a message and an upload that nothing encodes."""
    return bits_of(models_in(message, own)), bits_of(models_in(upload, own))


class Traffic(NamedTuple):
    """Bits of one client in a round: of its messages and of its uploads."""

    down: int
    up: int


def traffic(
    algorithm: Algorithm, state: TrainState, data: FederatedData, kind: int = 0
) -> Traffic:
    """What a client of this kind receives and sends in all exchanges of a round, from shapes."""
    down, up = 0, 0
    row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state.clients)
    for part in algorithm.exchanges:

        def exchange(server, row, data, key, part=part):
            return one_exchange(part, server, row, data.client(jnp.int32(0)), key)

        message, upload = shapes_of(exchange, state.server, row, data, state.key)
        received, sent = (part.bits[kind] or as_they_are)(message, upload, part.own)
        down, up = down + received, up + sent
    return Traffic(down, up)
