"""Where cells run: processes here, Ray, or SLURM through submitit.

An engine is `submit(cell) -> job`; a job has `done()`, and `cancel()`. However it ends, what
counts is the entry that the worker left in the book.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Protocol

from fedjax_flat import errors
from fedjax_flat.sweep.book import Book
from fedjax_flat.sweep.call import call


class Job(Protocol):
    """A cell that was started."""

    def done(self) -> bool:
        """Whether it has ended, well or not."""

    def cancel(self) -> None:
        """Ends it; its run folder keeps what was saved."""


class Engine(Protocol):
    """Runs cells."""

    workers: int

    def submit(self, name: str) -> Job:
        """Starts one."""

    def close(self) -> None:
        """Lets go of what it holds."""


def command(book: Book, name: str, data_dir: str | None) -> list[str]:
    """What trains a cell; `--parent PID` is to follow."""
    argv = [sys.executable, "-m", "fedjax_flat.sweep.worker", str(book.folder.resolve()), name]
    return [*argv, "--data", os.path.abspath(data_dir)] if data_dir else argv


class _Process:
    def __init__(self, argv: list[str], log: os.PathLike):
        with open(log, "ab") as file:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )

    def done(self) -> bool:
        return self._process.poll() is not None

    def cancel(self) -> None:
        if not self.done():
            self._process.terminate()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class Local:
    """Processes of this machine; they end when the driver does."""

    def __init__(self, book: Book, data_dir: str | None, workers: int, address: str):
        if address:
            raise errors.UsageError(f"--engine local={address}: it has no address. Leave it out.")
        self.workers = workers or max(1, (os.cpu_count() or 1) // 2)
        self._book, self._data_dir = book, data_dir

    def submit(self, name: str) -> Job:
        argv = [*command(self._book, name, self._data_dir), "--parent", str(os.getpid())]
        return _Process(argv, self._book.path(name, "log"))

    def close(self) -> None:
        pass


class Ray:
    """Tasks of a Ray cluster, which sees the sweep's folder; without an address, one of our own."""

    TIMEOUT = 30  # seconds

    def __init__(self, book: Book, data_dir: str | None, workers: int, address: str):
        try:
            import ray
        except ImportError as e:
            raise errors.UsageError(
                "--engine ray needs the package ray: pip install 'fedjax-flat[ray]'."
            ) from e
        self._ray, self._book, self._data_dir = ray, book, data_dir
        if address:
            _check_reachable(address, self.TIMEOUT)
        try:
            ray.init(
                address=address or None, num_cpus=None if address else (workers or 2),
                log_to_driver=False, configure_logging=False, include_dashboard=False,
            )
        except (ConnectionError, TimeoutError, ValueError, RuntimeError) as e:
            raise errors.UsageError(
                f"--engine ray={address}: no Ray cluster answers there ({e}). Start one with `ray "
                "start --head`, or leave the address out."
            ) from e
        self.workers = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._run = ray.remote(num_cpus=1, max_retries=0)(call)

    def submit(self, name: str) -> Job:
        argv = command(self._book, name, self._data_dir)
        log = str(self._book.path(name, "log").resolve())
        return _RayJob(self._ray, self._run.remote(argv, log))

    def close(self) -> None:
        self._ray.shutdown()


class _RayJob:
    def __init__(self, ray: Any, reference: Any):
        self._ray, self._reference = ray, reference

    def done(self) -> bool:
        return bool(self._ray.wait([self._reference], timeout=0)[0])

    def cancel(self) -> None:
        self._ray.cancel(self._reference, force=True)


# What a client of HTTP/2, and so of gRPC, begins with: its preface and no settings.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


def _check_reachable(address: str, seconds: float) -> None:
    """Ray itself would try for minutes, also where something listens and never answers."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address == "auto":
        return
    try:
        with socket.create_connection((host, int(port)), timeout=seconds) as there:
            there.sendall(_HELLO)
            there.recv(1)
    except (OSError, ValueError) as e:
        raise errors.UsageError(
            f"--engine ray={address}: cannot be reached within {seconds:g} s ({e}). Expected "
            "HOST:PORT of a running cluster, or no address for one of our own."
        ) from e


class Slurm:
    """Jobs of a SLURM cluster through submitit; `slurm=local` runs them here, for a try."""

    def __init__(self, book: Book, data_dir: str | None, workers: int, address: str):
        try:
            import submitit
        except ImportError as e:
            raise errors.UsageError(
                "--engine slurm needs the package submitit: pip install 'fedjax-flat[slurm]'."
            ) from e
        self._book, self._data_dir, self.workers = book, data_dir, workers or 64
        folder = str(book.folder / "submitit")
        try:
            self._executor = submitit.AutoExecutor(folder=folder, cluster=address or "slurm")
        except (RuntimeError, ValueError) as e:
            raise errors.UsageError(
                f"--engine slurm: {e}. Expected `sbatch` on this machine, or --engine slurm=local "
                "for a try."
            ) from e
        self._executor.update_parameters(name="fedjax-flat", timeout_min=24 * 60)

    def submit(self, name: str) -> Job:
        argv = command(self._book, name, self._data_dir)
        return self._executor.submit(call, argv, str(self._book.path(name, "log").resolve()))

    def close(self) -> None:
        pass


ENGINES: dict[str, Callable[[Book, str | None, int, str], Any]] = {
    "local": Local, "ray": Ray, "slurm": Slurm,
}
