"""Where the state of all K clients lives, and how a cohort's rows come and go.

One stacked tree, on the device or in host memory. A round moves only the cohort's rows: gathered
before the exchange, scattered after it, in place.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_flat.memory import Memory, place

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def choose(option: str, row: Any, num_clients: int, memory: Memory) -> str:
    """`device` or `host` for the state of all clients, or an error that says what is missing."""
    each = row_bytes(row)
    return place(
        "cohort.client_state", option, num_clients * each, memory,
        what=f"the state of {num_clients} clients ({each / 1e6:.1f} MB each)",
        advice="Use fewer clients, a smaller model, or a method without client state "
        "(fedjax-flat algorithms).",
    )


def stacked(row: Any, num_clients: int, where: str = "device") -> Any:
    """`num_clients` copies of one client's state."""
    if where == "device":
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_clients, *x.shape)), row)
    copies = lambda x: np.broadcast_to(np.asarray(x), (num_clients, *x.shape))
    return jax.tree.map(lambda x: jax.device_put(copies(x), HOST), row)


def gather(clients: Any, cohort: Any) -> Any:
    """The rows of the cohort, on the device."""

    def rows(x):
        if not _on_host(x):
            return x[cohort.clients]
        return jax.lax.map(lambda k: row(x, k), cohort.clients)

    return jax.tree.map(rows, clients)


def row(clients: Any, k: Any) -> Any:
    """One client's state, on the device."""

    def one(x):
        if not _on_host(x):
            return x[k]
        return jax.device_put(jax.lax.dynamic_index_in_dim(x, k, keepdims=False), DEVICE)

    return jax.tree.map(one, clients)


def scatter(clients: Any, cohort: Any, rows: Any) -> Any:
    """Writes the cohort's rows back; slots without a client change nothing."""

    def write(x, new):
        slots = cohort.clients
        if not _on_host(x):
            if cohort.mask is not None:
                slots = jnp.where(cohort.mask, slots, x.shape[0])  # past the end, dropped
            return x.at[slots].set(new, mode="drop")

        def put(i, x):
            row = new[i]
            if cohort.mask is not None:
                old = jax.lax.dynamic_index_in_dim(x, slots[i], keepdims=False)
                row = jnp.where(cohort.mask[i], row, jax.device_put(old, DEVICE))
            return jax.lax.dynamic_update_index_in_dim(x, jax.device_put(row, HOST), slots[i], 0)

        return jax.lax.fori_loop(0, slots.shape[0], put, x)

    return jax.tree.map(write, clients, rows)


def row_bytes(row: Any) -> int:
    """Bytes of one client's state."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(row))


def _on_host(x: jax.Array) -> bool:
    return jax.typeof(x).memory_space == HOST
