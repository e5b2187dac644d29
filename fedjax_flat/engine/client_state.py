"""Where the state of all K clients lives, and how a cohort's rows come and go.

One stacked tree, on the device or in host memory. A round moves only the cohort's rows: gathered
before the exchange, scattered after it, in place.
"""

import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_flat import errors

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
LARGEST_SHARE = 0.5  # of free memory that client state may take


class Memory(NamedTuple):
    """Free bytes; `device` is None where the device has no memory of its own."""

    device: int | None
    host: int


def free_memory() -> Memory:
    """What this machine has left."""
    stats = jax.local_devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    device = limit - stats.get("bytes_in_use", 0) if limit else None
    fields = dict(
        line.split(":") for line in pathlib.Path("/proc/meminfo").read_text().splitlines()
    ) if pathlib.Path("/proc/meminfo").exists() else {}
    host = int(fields["MemAvailable"].split()[0]) * 1024 if fields else 2**63
    return Memory(device, host)


def choose(option: str, row: Any, num_clients: int, memory: Memory) -> str:
    """`device` or `host` for the state of all clients, or an error that says what is missing."""
    errors.lookup("cohort.client_state", option, dict.fromkeys(("auto", "device", "host")))
    needed = num_clients * row_bytes(row)
    fits = lambda free: free is None or needed <= LARGEST_SHARE * free
    if option == "auto":
        option = "device" if memory.device is not None and fits(memory.device) else "host"
        if memory.device is None:
            option = "device"  # which is the host
    free = memory.device if option == "device" and memory.device is not None else memory.host
    if not fits(free):
        raise errors.UsageError(
            f"the state of {num_clients} clients needs {gigabytes(needed)} "
            f"({row_bytes(row) / 1e6:.1f} MB each); {gigabytes(free)} of {option} memory are free, "
            f"of which {LARGEST_SHARE:.0%} may be used. Use fewer clients, a smaller model, or a "
            "method without client state (fedjax-flat algorithms)."
        )
    return option


def stacked(row: Any, num_clients: int, where: str = "device") -> Any:
    """`num_clients` copies of one client's state."""
    if where == "device":
        return jax.tree.map(lambda x: jnp.repeat(x[None], num_clients, axis=0), row)
    copies = lambda x: np.broadcast_to(np.asarray(x), (num_clients, *x.shape))
    return jax.tree.map(lambda x: jax.device_put(copies(x), HOST), row)


def gather(clients: Any, cohort: Any) -> Any:
    """The rows of the cohort, on the device."""

    def rows(x):
        if not _on_host(x):
            return x[cohort.clients]
        one = lambda k: jax.device_put(
            jax.lax.dynamic_index_in_dim(x, k, keepdims=False), DEVICE
        )
        return jax.lax.map(one, cohort.clients)

    return jax.tree.map(rows, clients)


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


def gigabytes(count: int) -> str:
    """'31.9 GB'."""
    return f"{count / 1e9:.1f} GB"


def _on_host(x: jax.Array) -> bool:
    return jax.typeof(x).memory_space == HOST
