"""Who takes part in a round. Cohorts depend on the seed and the round, and on nothing else.

`uniform` and `bernoulli` draw every round by itself; `once` goes through all clients before it
comes to one again.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat import errors, rng

MANY = 100_000  # clients, from which on nothing is drawn for each of them


class Cohort(NamedTuple):
    """Client numbers; `mask` is False for slots without a client, None when all are filled."""

    clients: jax.Array
    mask: jax.Array | None


class Schedule(NamedTuple):
    """Cohorts that know of each other: `at(key, round)`, with one key for all rounds."""

    at: Callable[[jax.Array, jax.Array], Cohort]


Sampler = Callable[[jax.Array], Cohort] | Schedule  # a function has a key of each round's own


def draw(sample: Sampler, key: jax.Array, round: jax.Array) -> Cohort:
    """The cohort of a round, of a run's key."""
    if isinstance(sample, Schedule):
        return sample.at(rng.fold(key, "cohort"), round)
    return sample(rng.fold(key, "cohort", round))


def uniform(num_clients: int, size: int) -> Callable[[jax.Array], Cohort]:
    """`size` distinct clients, all subsets equally likely."""
    _check_size(num_clients, size)

    def sample(key):
        if num_clients > MANY:
            return Cohort(_distinct(key, num_clients, size), None)
        # The `size` largest of K random numbers: no sort of all K, and never the same client twice.
        draws = jax.random.bits(key, (num_clients,), jnp.uint32)
        return Cohort(jax.lax.top_k(draws, size)[1].astype(jnp.int32), None)

    return sample


def once(num_clients: int, size: int) -> Schedule:
    """Every client exactly once in ceil(K / size) rounds; then once more, in another order.

    Where `size` does not divide K, the last cohort of a pass has empty slots.
    """
    _check_size(num_clients, size)
    rounds = -(-num_clients // size)

    def at(key, round):
        draws = jax.random.bits(rng.fold(key, "pass", round // rounds), (num_clients,), jnp.uint32)
        order = jnp.argsort(draws).astype(jnp.int32)
        place = round % rounds * size + jnp.arange(size, dtype=jnp.int32)
        chosen = order[jnp.minimum(place, num_clients - 1)]
        return Cohort(chosen, None if num_clients % size == 0 else place < num_clients)

    return Schedule(at)


def _check_size(num_clients: int, size: int) -> None:
    if not 1 <= size <= num_clients:
        raise errors.UsageError(
            f"a cohort of {size} from {num_clients} clients: expected between 1 and {num_clients}. "
            "Lower cohort.size or raise partition.clients."
        )


def bernoulli(
    num_clients: int, size: float, *, slots: int | None = None
) -> Callable[[jax.Array], Cohort]:
    """Each client on its own with probability size / num_clients.

    The cohort has a fixed number of slots, by default `size` plus six standard deviations; were
    more clients drawn (a chance of about 1e-9 per round), a random part of them would be left out.
    """
    probability = size / num_clients
    if not 0 < probability <= 1:
        raise errors.UsageError(
            f"an expected cohort of {size} from {num_clients} clients: expected more than 0 and at "
            f"most {num_clients}."
        )
    if slots is None:
        slots = math.ceil(size + 6 * math.sqrt(size * (1 - probability)) + 3)
    slots = min(slots, num_clients)

    def sample(key):
        if num_clients > MANY:  # how many, then who
            count = jax.random.binomial(rng.fold(key, "count"), num_clients, probability)
            clients = _distinct(key, num_clients, slots)
            return Cohort(clients, jnp.arange(slots) < count.astype(jnp.int32))
        draws = jax.random.uniform(key, (num_clients,), jnp.float32)
        value, clients = jax.lax.top_k(-draws, slots)
        return Cohort(clients.astype(jnp.int32), -value < probability)

    return sample


def _distinct(key: jax.Array, count: int, size: int) -> jax.Array:
    """`size` distinct numbers below `count`, at a cost that does not grow with `count`.

    The first `size` steps of a Fisher-Yates shuffle of 0 .. count - 1, of which only the places
    that were swapped are kept: places[i] holds values[i].
    """

    def step(i, carry):
        places, values, chosen = carry

        def at(place):  # the last value put there, or the place's own number
            last = jnp.max(jnp.where(places == place, jnp.arange(size), -1))
            return jnp.where(last < 0, place, values[last])

        drawn = jax.random.randint(rng.fold(key, "draw", i), (), i, count, jnp.int32)
        chosen = chosen.at[i].set(at(drawn))
        return places.at[i].set(drawn), values.at[i].set(at(i)), chosen

    empty = jnp.full(size, -1, jnp.int32)
    return jax.lax.fori_loop(0, size, step, (empty, empty, empty))[2]


def pad(cohort: Cohort, multiple: int) -> Cohort:
    """Adds empty slots up to a multiple of `multiple`."""
    missing = -cohort.clients.shape[0] % multiple
    if not missing:
        return cohort
    mask = jnp.ones(cohort.clients.shape, bool) if cohort.mask is None else cohort.mask
    return Cohort(jnp.pad(cohort.clients, (0, missing)), jnp.pad(mask, (0, missing)))


SAMPLERS: dict[str, Callable[..., Sampler]] = {
    "uniform": uniform, "bernoulli": bernoulli, "once": once,
}
