"""Who takes part in a round. Cohorts depend on the seed and the round, and on nothing else.

`uniform` and `bernoulli` draw every round by itself, and so does `sizes`, by what clients have;
`once` goes through all clients before it comes to one again; `apart` has other clients in every
place of the cohort than the round before. `stratified` draws as many from each cluster, `growing`
a share of groups that become more.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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


def sizes(examples: np.ndarray, size: int) -> Callable[[jax.Array], Cohort]:
    """`size` distinct clients, drawn one after the other with chances as their examples."""
    examples = np.asarray(examples, np.float64)
    _check_size(int(np.count_nonzero(examples)), size)
    chances = np.log(np.where(examples > 0, examples, 1)) - np.where(examples > 0, 0, np.inf)
    logits = chances.astype(np.float32)

    def sample(key):  # the largest of logits with Gumbel noise
        draws = logits + jax.random.gumbel(key, logits.shape)
        return Cohort(jax.lax.top_k(draws, size)[1].astype(jnp.int32), None)

    return sample


def apart(num_clients: int, size: int) -> Schedule:
    """As `uniform`, but no place of the cohort has the same client in two rounds running.

    Even rounds are drawn by themselves. In odd rounds the order that is drawn is turned until it
    has none of its neighbours' clients in their places, which a turn can do if there are more than
    twice `size` clients; with fewer, the turn that repeats fewest is taken.
    """
    _check_size(num_clients, size)

    def order(key, round):
        draws = jax.random.bits(rng.fold(key, "apart", round), (num_clients,), jnp.uint32)
        return jnp.argsort(draws).astype(jnp.int32)

    def at(key, round):
        own = order(key, round)
        before, after = order(key, round - 1)[:size], order(key, round + 1)[:size]
        places = (jnp.arange(num_clients)[:, None] + jnp.arange(size)[None]) % num_clients
        turned = own[places]  # one row per turn
        same = (turned == before[None]) | (turned == after[None])
        best = turned[jnp.argmin(jnp.sum(same, axis=1))]
        return Cohort(jnp.where(round % 2 == 0, own[:size], best), None)

    return Schedule(at)


def stratified(clusters: np.ndarray, size: int) -> Callable[[jax.Array], Cohort]:
    """As many clients of each cluster, all subsets equally likely; rows of clients, then -1."""
    count, longest = clusters.shape
    each = size // count
    if size % count or not 1 <= each <= longest:
        raise errors.UsageError(
            f"a cohort of {size} from {count} clusters of up to {longest} clients: expected as "
            f"many of each, {count}, {2 * count}, ... up to {count * longest}."
        )

    def sample(key):
        draws = jax.random.bits(key, (int(clusters.max()) + 1,), jnp.uint32) >> 1
        rows = jnp.asarray(clusters)
        chances = jnp.where(rows >= 0, draws[jnp.maximum(rows, 0)] + jnp.uint32(1), jnp.uint32(0))
        value, place = jax.lax.top_k(chances, each)
        chosen = jnp.take_along_axis(rows, place, axis=1).ravel()
        mask = None if (clusters >= 0).sum(axis=1).min() >= each else value.ravel() > 0
        return Cohort(jnp.maximum(chosen, 0), mask)

    return sample


def share_of(share: float, members: int) -> int:
    """max(1, floor(C n))."""
    return max(1, math.floor(share * members + 1e-9))


def growing(starts: np.ndarray, counts: np.ndarray, share: float) -> Schedule:
    """A share of the members, of which there are counts[i] from round starts[i] on."""
    most = int(counts.max())
    slots = share_of(share, most)
    wanted = np.array([share_of(share, int(n)) for n in counts], np.int32)

    def at(key, round):
        stage = jnp.searchsorted(jnp.asarray(starts), round, side="right") - 1
        draw = jax.vmap(lambda key: jax.random.bits(key, dtype=jnp.uint32) >> 1)
        draws = draw(rng.fold_each(rng.fold(key, "growing", round), most))  # whatever `most` is
        there = jnp.arange(most) < jnp.asarray(counts)[stage]
        chosen = jax.lax.top_k(jnp.where(there, draws + jnp.uint32(1), jnp.uint32(0)), slots)[1]
        return Cohort(chosen.astype(jnp.int32), jnp.arange(slots) < jnp.asarray(wanted)[stage])

    return Schedule(at)


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
    "uniform": uniform, "bernoulli": bernoulli, "once": once, "apart": apart,
}
