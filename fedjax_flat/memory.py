"""Where something large is kept: on the device, in host memory, or nowhere."""

import pathlib
from typing import Any, NamedTuple

import jax

from fedjax_flat import errors

LARGEST_SHARE = 0.5  # of free memory that one thing may take


class Memory(NamedTuple):
    """Free bytes; `device` is None where the device has no memory of its own."""

    device: int | None
    host: int


def free() -> Memory:
    """What this machine has left."""
    stats = jax.local_devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    device = limit - stats.get("bytes_in_use", 0) if limit else None
    fields = dict(
        line.split(":") for line in pathlib.Path("/proc/meminfo").read_text().splitlines()
    ) if pathlib.Path("/proc/meminfo").exists() else {}
    host = int(fields["MemAvailable"].split()[0]) * 1024 if fields else 2**63
    return Memory(device, host)


def place(setting: str, option: str, needed: int, memory: Memory, *, what: str, advice: str) -> str:
    """`device` or `host` for `needed` bytes, or an error that says what is missing.

    Option `auto` prefers the device; one without memory of its own is the host.
    """
    errors.lookup(setting, option, dict.fromkeys(("auto", "device", "host")))
    fits = lambda free: free is None or needed <= LARGEST_SHARE * free
    if option == "auto":
        option = "device" if fits(memory.device) else "host"
    free = memory.device if option == "device" and memory.device is not None else memory.host
    if not fits(free):
        raise errors.UsageError(
            f"{what} needs {gigabytes(needed)}; {gigabytes(free)} of {option} memory are free, of "
            f"which {LARGEST_SHARE:.0%} may be used. {advice}"
        )
    return option


def fits(tree: Any) -> bool:
    """Whether arrays of these shapes may be kept, beside what else there is, on the device."""
    device, host = free()
    return size_of(tree) <= LARGEST_SHARE * (host if device is None else device)


def size_of(tree: Any) -> int:
    """Bytes of arrays of these shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def check(what: str, needed: int, advice: str) -> None:
    """Refuses what would take more than a share of the memory, before it is tried."""
    place("memory", "device", needed, free(), what=what, advice=advice)


def is_exhausted(error: Exception) -> bool:
    """Whether NumPy or XLA asked for more memory than there is."""
    return isinstance(error, MemoryError) or "Out of memory" in str(error)


def gigabytes(count: int) -> str:
    """'31.9 GB'."""
    return f"{count / 1e9:.1f} GB"
