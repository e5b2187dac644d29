"""A federated round as one pure function, and several of them in one dispatch."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_flat import debug, rng
from fedjax_flat.algorithms.base import Algorithm, Exchange, Uploads
from fedjax_flat.data.federated import FederatedData
from fedjax_flat.engine import client_state, sampling
from fedjax_flat.engine.cohort import CohortMap
from fedjax_flat.engine.sampling import Sampler
from fedjax_flat.server import Average, aggregate


class TrainState(NamedTuple):
    """Everything a round needs and everything a checkpoint holds."""

    round: jax.Array
    key: jax.Array
    server: Any
    clients: Any
    averages: dict[str, Any]  # by name, beside the model that is trained
    pseudo_gradient: Any  # of the round before


class RoundInfo(NamedTuple):
    """What happened in a round, over the clients that took part."""

    loss: jax.Array  # mean over the examples visited, each at its parameters before the step
    accuracy: jax.Array
    drift: jax.Array  # mean over clients
    norm: jax.Array  # of the global model, after the round
    cosine: jax.Array  # between this round's pseudo-gradient and the one before
    examples: jax.Array  # visited, so an example counts once per local epoch
    clients: jax.Array
    finite: jax.Array
    metrics: dict[str, jax.Array]  # what the method itself measures


RoundStep = Callable[[TrainState, FederatedData], tuple[TrainState, RoundInfo]]


Averages = Mapping[str, Average]
NO_AVERAGES: Averages = {}


def init_state(
    algorithm: Algorithm,
    params: Any,
    num_clients: int,
    key: jax.Array,
    averages: Averages = NO_AVERAGES,
    client_state_in: str = "device",
) -> TrainState:
    """The state before the first round; the clients' is kept on the `device` or the `host`."""
    server, row = algorithm.init(params, num_clients)
    clients = client_state.stacked(row, num_clients, client_state_in)
    server = jax.tree.map(jnp.copy, server)  # a donated buffer may occur only once
    started = {name: average.init(params) for name, average in averages.items()}
    zero = jax.tree.map(jnp.zeros_like, params)
    return TrainState(jax.device_put(np.int32(0)), key, server, clients, started, zero)


def _exchange(
    cohort_map: CohortMap, part: Exchange, state: TrainState, server, rows, cohort, data, *,
    keep_models: bool = False,
):
    """One message down and the uploads back: (server, rows, uploads, info, metrics, models)."""

    def work(shared, member):
        message, data, round, key = shared
        (k, mask), row = member
        client_key = rng.fold(key, "client", round, k)
        result = part.local(message, row, data.client(k, mask), round, client_key)
        present = result.weight > 0
        count = present.astype(jnp.float32)
        if_present = lambda x: jnp.where(present, x, jnp.zeros_like(x))
        summed = (
            aggregate.weighted(result.delta, result.weight),
            result.weight,
            jax.tree.map(if_present, (result.delta, result.total)),
            (result.info.totals, count, count * result.info.drift),
        )
        # A client without examples keeps its state.
        row = jax.tree.map(lambda new, old: jnp.where(present, new, old), result.state, row)
        kept = (result.delta, result.weight) if part.keeps_deltas else ()
        return summed, (row, kept, result.info.model if keep_models else ())

    message = part.broadcast(server, state.round)
    summed, (rows, kept, models) = cohort_map.run(
        work, (message, data, state.round, state.key), (cohort, rows)
    )
    weighted_sum, weight, (delta_sum, total), info = summed
    pseudo_gradient = aggregate.mean(weighted_sum, weight)
    deltas, weights = kept or ((), ())
    uploads = Uploads(pseudo_gradient, delta_sum, total, info[1], deltas, weights)
    debug.check({"aggregate": uploads.pseudo_gradient}, round=state.round)
    updated, metrics = part.update(server, uploads, state.round)
    # A round in which nobody took part changes nothing.
    server = jax.tree.map(lambda new, old: jnp.where(weight > 0, new, old), updated, server)
    return server, rows, uploads, info, metrics, models


def round_step(
    algorithm: Algorithm,
    sample: Sampler,
    cohort_map: CohortMap,
    averages: Averages = NO_AVERAGES,
) -> RoundStep:
    """One round: sample, broadcast, train locally, aggregate, update, average."""

    def step(state: TrainState, data: FederatedData) -> tuple[TrainState, RoundInfo]:
        cohort = sample(rng.fold(state.key, "cohort", state.round))
        cohort = sampling.pad(cohort, cohort_map.multiple)
        server = state.server
        rows = client_state.gather(state.clients, cohort)
        metrics: dict[str, jax.Array] = {}
        for part in algorithm.exchanges:
            server, rows, uploads, seen, measured, _ = _exchange(
                cohort_map, part, state, server, rows, cohort, data
            )
            metrics |= measured
        totals, clients, drift = seen
        loss, accuracy = totals.means()
        model = algorithm.models(server)["global"]
        info = RoundInfo(
            loss=loss,
            accuracy=accuracy,
            drift=drift / jnp.maximum(clients, 1),
            norm=optax.tree.norm(model),
            cosine=cosine(uploads.pseudo_gradient, state.pseudo_gradient),
            examples=totals.examples,
            clients=clients,
            finite=all_finite((loss, server)),
            metrics=metrics,
        )
        state = TrainState(
            round=state.round + 1,
            key=state.key,
            server=server,
            clients=client_state.scatter(state.clients, cohort, rows),
            averages={
                name: average.update(state.averages[name], model, state.round)
                for name, average in averages.items()
            },
            pseudo_gradient=uploads.pseudo_gradient,
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
            server, rows, *_, trained = _exchange(
                cohort_map, part, state, server, rows, cohort, data, keep_models=True
            )
        return jax.tree.map(lambda x: x[: clients.shape[0]], trained)

    return models


def cosine(a: Any, b: Any) -> jax.Array:
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


def floats_per_client(algorithm: Algorithm, state: TrainState, data: FederatedData):
    """(floats in the messages, floats in the uploads) of one client in a round, from shapes."""

    def all_exchanges(state, data):
        zero = jnp.int32(0)
        row = algorithm.init(state.pseudo_gradient, data.num_clients)[1]
        sent = []
        for part in algorithm.exchanges:
            message = part.broadcast(state.server, zero)
            result = part.local(message, row, data.client(zero), zero, state.key)
            sent.append((message, (result.delta, result.total)))
        return [m for m, _ in sent], [u for _, u in sent]

    def floats(tree):
        leaves = jax.tree.leaves(tree)
        # What is less than a model, a step count, travels for free.
        return sum(x.size for x in leaves if jnp.issubdtype(x.dtype, jnp.floating) and x.ndim)

    messages, uploads = jax.eval_shape(all_exchanges, state, data)
    return floats(messages), floats(uploads)
