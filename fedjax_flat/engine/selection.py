"""Cohorts of clients that are fast enough, or equally fast: FedCS and TiFL, by the clock.

Nishio and Yonetani, "Client selection for federated learning with heterogeneous resources in mobile
edge" (ICC 2019): clients at random say how long they would take; those that would be back before
the deadline are admitted, the fastest first. Chai et al., "TiFL: a tier-based federated learning
system" (HPDC 2020): clients are sorted by how long they take into tiers of equal size; each round
is of one tier, all equally likely. (Its probabilities by the tiers' accuracy are left out.)
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_flat import errors, rng
from fedjax_flat.engine.clock import Clock
from fedjax_flat.engine.sampling import Cohort, Schedule, uniform


def deadline(clock: Clock, size: int, *, candidates: int, seconds: float) -> Schedule:
    """Of `candidates` clients, at most `size` of those that take no longer than `seconds`."""
    errors.positive("cohort.deadline", seconds)
    count = len(clock.work)
    if not size <= candidates <= count:
        raise errors.UsageError(
            f"cohort.candidates = {candidates}: expected between cohort.size = {size} and the "
            f"{count} clients."
        )
    ask = uniform(count, candidates)

    def at(key, round):
        asked = ask(rng.fold(key, round)).clients
        negative, fastest = jax.lax.top_k(-clock.duration(round, asked), size)
        return Cohort(asked[fastest], -negative <= seconds)

    return Schedule(at)


def tiers(clock: Clock, size: int, *, tiers: int) -> Schedule:
    """`size` clients of one tier, of `tiers` that differ by at most one in number."""
    count = len(clock.work)
    errors.at_least("cohort.tiers", tiers, 1)
    if count // tiers < size:
        raise errors.UsageError(
            f"cohort.tiers = {tiers} of {count} clients: a tier has {count // tiers}, fewer than "
            f"cohort.size = {size}. Lower one of them."
        )
    order = np.argsort(clock.work, kind="stable")
    tier = np.empty(count, np.int32)
    tier[order] = np.arange(count) * tiers // count

    def at(key, round):
        key = rng.fold(key, round)
        chosen = jax.random.randint(rng.fold(key, "tier"), (), 0, tiers, jnp.int32)
        draws = jax.random.uniform(rng.fold(key, "clients"), (count,), jnp.float32)
        mine = jnp.where(jnp.asarray(tier) == chosen, draws, -1.0)
        return Cohort(jax.lax.top_k(mine, size)[1].astype(jnp.int32), None)

    return Schedule(at)


SELECTIONS: dict[str, Callable[..., Schedule]] = {"deadline": deadline, "tiers": tiers}
