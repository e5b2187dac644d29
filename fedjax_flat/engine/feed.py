"""Each round's examples from the host, made ready while the round before runs."""

import concurrent.futures
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_flat.data import FederatedData
from fedjax_flat.engine.sampling import Cohort


class Feed:
    """`of_round(round)`: the data of that round's cohort; close it when done."""

    def __init__(
        self,
        data_at: Callable[[int], Any],  # -> HostData
        cohort_of: Callable[[jax.Array, jax.Array], Cohort],
        key: jax.Array,
        place: Callable[[FederatedData], FederatedData] = lambda data: data,
    ):
        self._data_at, self._place = data_at, place
        key = jnp.copy(key)  # the state's own is donated to the next state
        self._cohort = lambda round: cohort_of(key, jax.device_put(np.int32(round)))
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "fedjax_flat feed")
        self._next: tuple[int, concurrent.futures.Future[Any]] | None = None

    def of_round(self, round: int) -> FederatedData:
        """Of the cohort of this round; the next one's is begun."""
        if self._next is None or self._next[0] != round:
            self._next = (round, self._submit(round))
        ready = self._next[1].result()
        self._next = (round + 1, self._submit(round + 1))
        return ready

    def _submit(self, round: int) -> concurrent.futures.Future[Any]:
        return self._worker.submit(self._gather, round, np.asarray(self._cohort(round).clients))

    def _gather(self, round: int, clients: np.ndarray) -> FederatedData:
        return jax.block_until_ready(self._place(self._data_at(round).of(clients)))

    def close(self) -> None:
        """Ends the worker."""
        self._worker.shutdown(cancel_futures=True)
