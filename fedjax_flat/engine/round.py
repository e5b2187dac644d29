"""A federated round as one pure function, and several of them in one dispatch."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_flat import debug, rng
from fedjax_flat.algorithms.base import Algorithm
from fedjax_flat.data.federated import FederatedData
from fedjax_flat.engine import sampling
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


class RoundInfo(NamedTuple):
    """What happened in a round, over the clients that took part."""

    loss: jax.Array  # mean over the examples visited, each at its parameters before the step
    accuracy: jax.Array
    drift: jax.Array  # mean over clients
    examples: jax.Array  # visited, so an example counts once per local epoch
    clients: jax.Array
    finite: jax.Array


RoundStep = Callable[[TrainState, FederatedData], tuple[TrainState, RoundInfo]]


Averages = Mapping[str, Average]
NO_AVERAGES: Averages = {}


def init_state(
    algorithm: Algorithm,
    params: Any,
    num_clients: int,
    key: jax.Array,
    averages: Averages = NO_AVERAGES,
) -> TrainState:
    """The state before the first round."""
    server, clients = algorithm.init(params, num_clients)
    started = {name: average.init(params) for name, average in averages.items()}
    return TrainState(jax.device_put(np.int32(0)), key, server, clients, started)


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
        message = algorithm.broadcast(state.server)
        rows = jax.tree.map(lambda x: x[cohort.clients], state.clients)

        def work(shared, member):
            message, data, round, key = shared
            (k, mask), row = member
            client_key = rng.fold(key, "client", round, k)
            result = algorithm.local(message, row, data.client(k, mask), round, client_key)
            took_part = (result.weight > 0).astype(jnp.float32)
            summed = (
                aggregate.weighted(result.upload, result.weight),
                result.weight,
                (result.info.totals, took_part, took_part * result.info.drift),
            )
            return summed, result.state

        summed, rows = cohort_map.run(
            work, (message, data, state.round, state.key), (cohort, rows)
        )
        weighted_sum, weight, (totals, clients, drift) = summed
        upload = aggregate.mean(weighted_sum, weight)
        debug.check({"aggregate": upload}, round=state.round)
        server = algorithm.update(state.server, upload)
        # A round in which nobody took part changes nothing.
        keep = lambda new, old: jnp.where(weight > 0, new, old)
        server = jax.tree.map(keep, server, state.server)
        loss, accuracy = totals.means()
        info = RoundInfo(
            loss=loss,
            accuracy=accuracy,
            drift=drift / jnp.maximum(clients, 1),
            examples=totals.examples,
            clients=clients,
            finite=all_finite((loss, server)),
        )
        state = TrainState(
            round=state.round + 1,
            key=state.key,
            server=server,
            clients=scatter(state.clients, cohort, rows),
            averages={
                name: average.update(
                    state.averages[name], algorithm.models(server)["global"], state.round
                )
                for name, average in averages.items()
            },
        )
        return state, info

    return step


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


def scatter(clients: Any, cohort: Any, rows: Any) -> Any:
    """Writes the cohort's rows back; slots without a client point past the end and are dropped."""

    def write(all_rows, new):
        slots = cohort.clients
        if cohort.mask is not None:
            slots = jnp.where(cohort.mask, slots, all_rows.shape[0])
        return all_rows.at[slots].set(new, mode="drop")

    return jax.tree.map(write, clients, rows)


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
    """(floats in the message, floats in the upload) of one client, from shapes alone."""

    def exchange(state, data):
        message = algorithm.broadcast(state.server)
        row = jax.tree.map(lambda x: x[0], state.clients)
        zero = jnp.int32(0)
        return message, algorithm.local(message, row, data.client(zero), zero, state.key).upload

    def floats(tree):
        leaves = jax.tree.leaves(tree)
        return sum(x.size for x in leaves if jnp.issubdtype(x.dtype, jnp.floating))

    message, upload = jax.eval_shape(exchange, state, data)
    return floats(message), floats(upload)

