"""Any algorithm whose rounds last as long as the slowest client that is waited for."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_flat.algorithms.base import Algorithm


def timed(algorithm: Algorithm, seconds: Callable[[jax.Array], jax.Array]) -> Algorithm:
    """`algorithm`, measuring `seconds(round)` of every member of the round's cohort.

    Slots without a client have 0 seconds. Of two exchanges, the time is that of both together.
    """
    *first, last = algorithm.exchanges

    def update(server, uploads, round):
        server, metrics = last.update(server, uploads, round)
        return server, {**metrics, "seconds": jnp.max(seconds(round))}

    return algorithm._replace(exchanges=(*first, last._replace(update=update)))
