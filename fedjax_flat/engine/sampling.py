"""Who takes part in a round. Cohorts depend on the seed and the round, and on nothing else."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat import errors


class Cohort(NamedTuple):
    """Client numbers; `mask` is False for slots without a client, None when all are filled."""

    clients: jax.Array
    mask: jax.Array | None


Sampler = Callable[[jax.Array], Cohort]


def uniform(num_clients: int, size: int) -> Sampler:
    """`size` distinct clients, all subsets equally likely."""
    if not 1 <= size <= num_clients:
        raise errors.UsageError(
            f"a cohort of {size} from {num_clients} clients: expected between 1 and {num_clients}. "
            "Lower cohort.size or raise partition.clients."
        )

    def sample(key):
        # The `size` largest of K random numbers: no sort of all K, and never the same client twice.
        draws = jax.random.bits(key, (num_clients,), jnp.uint32)
        return Cohort(jax.lax.top_k(draws, size)[1].astype(jnp.int32), None)

    return sample


def bernoulli(num_clients: int, size: float, *, slots: int | None = None) -> Sampler:
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
        draws = jax.random.uniform(key, (num_clients,), jnp.float32)
        value, clients = jax.lax.top_k(-draws, slots)
        return Cohort(clients.astype(jnp.int32), -value < probability)

    return sample


def pad(cohort: Cohort, multiple: int) -> Cohort:
    """Adds empty slots up to a multiple of `multiple`."""
    missing = -cohort.clients.shape[0] % multiple
    if not missing:
        return cohort
    mask = jnp.ones(cohort.clients.shape, bool) if cohort.mask is None else cohort.mask
    return Cohort(jnp.pad(cohort.clients, (0, missing)), jnp.pad(mask, (0, missing)))


SAMPLERS = {"uniform": uniform, "bernoulli": bernoulli}
