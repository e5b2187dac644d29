"""More than one process: start-up, agreement, and who writes.

Every process runs the same program on the same global arrays and does its devices' share of each
cohort. Process 0 alone writes files and decides how many rounds come next; any may ask to stop.
"""

import os
import socket
import time
from typing import Any

import jax
import numpy as np
from jax._src.clusters import ClusterEnv
from jax.experimental import multihost_utils

from fedjax_flat import errors


def start(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    timeout: int = 60,
) -> bool:
    """Joins the other processes; False when neither arguments nor environment ask for it.

    Missing arguments come from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID;
    coordinator `auto` leaves all of them to jax, which knows SLURM, Open MPI and Cloud TPU.
    """
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if not coordinator:
        if processes or process:
            raise errors.UsageError("--processes and --process need --coordinator HOST:PORT.")
        return False
    devices = None
    if coordinator == "auto":
        coordinator, processes, process, devices = _of_cluster(processes, process, timeout)
    processes = _from_environment("--processes", processes, "JAX_NUM_PROCESSES")
    process = _from_environment("--process", process, "JAX_PROCESS_ID")
    if not 0 <= process < processes:
        raise errors.UsageError(
            f"--process {process} of --processes {processes}: expected 0 to {processes - 1}."
        )
    if process > 0:
        _wait_for(coordinator, timeout)
    # It would catch SIGTERM until training does, and then nobody would hear of it.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator, processes, process, devices, initialization_timeout=timeout
        )
    except (RuntimeError, ValueError) as e:
        raise errors.UsageError(
            f"process {process} of {processes} could not join the others at {coordinator} within "
            f"{timeout} s: {str(e).splitlines()[0]}"
        ) from e
    return True


def _of_cluster(processes: int | None, process: int | None, timeout: int) -> tuple:
    """(coordinator, processes, process, devices of this process or None) as jax finds them."""
    try:
        found = ClusterEnv.auto_detect_unset_distributed_params(
            None, processes, process, None, None, timeout
        )
    except (RuntimeError, ValueError, OSError, KeyError) as e:  # of what a cluster says of itself
        said = (str(e).splitlines() or [type(e).__name__])[0]
        raise errors.UsageError(f"--coordinator auto: this cluster does not say how: {said}") from e
    if found[0] is None:
        srun = " In a SLURM job, start it with srun." if "SLURM_JOB_ID" in os.environ else ""
        raise errors.UsageError(
            "--coordinator auto: this is no task of a cluster that jax knows (SLURM, Open MPI, "
            f"Cloud TPU, Kubernetes).{srun} Say where processes meet with --coordinator HOST:PORT, "
            "or leave it out to train with this process alone."
        )
    return found


def _from_environment(flag: str, value: int | None, variable: str) -> int:
    if value is not None:
        return value
    text = os.environ.get(variable, "")
    if not text.isdigit():
        raise errors.UsageError(f"--coordinator needs {flag} (or {variable}), a whole number.")
    return int(text)


def _wait_for(coordinator: str, timeout: int) -> None:
    """Jax would abort the process where the coordinator does not answer; an error is kinder."""
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
        raise errors.UsageError(f"coordinator {coordinator!r}: expected HOST:PORT.")
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return
        except OSError as e:
            if time.monotonic() > deadline:
                raise errors.UsageError(
                    f"no coordinator answers at {coordinator} after {timeout} s ({e}). Is process "
                    "0 running, and is the port open?"
                ) from e
            time.sleep(0.2)


def is_primary() -> bool:
    """Whether this process writes."""
    return jax.process_index() == 0


def largest(*numbers: int) -> list[int]:
    """The largest that any process has of each, in every process; all ask at the same point."""
    if jax.process_count() == 1:
        return list(numbers)
    return multihost_utils.process_allgather(np.array(numbers, np.int32)).max(0).tolist()


def from_primary(tree: Any) -> Any:
    """What process 0 has, in every process, as NumPy arrays; the tree itself when alone."""
    if jax.process_count() == 1:
        return tree
    return jax.tree.map(np.asarray, multihost_utils.broadcast_one_to_all(tree))
