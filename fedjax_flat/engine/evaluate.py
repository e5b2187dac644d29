"""The task's report on a whole split, or on every client's own examples.

Both are sums over masked batches, taken by the same cohort map as training: in sequence on one
device, shared among several, where each takes a part of the split.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_flat.algorithms import Algorithm
from fedjax_flat.data import Examples, FederatedData, count_of, over, whole
from fedjax_flat.engine import client_state
from fedjax_flat.engine.cohort import CohortMap, cohort_map
from fedjax_flat.models import Variables
from fedjax_flat.tasks import Sums, Task


def evaluator(
    task: Task, batch_size: int, parts: CohortMap | None = None
) -> Callable[[Variables, Examples], Sums]:
    """`evaluate(variables, examples) -> sums`; jit it, and pass the examples as an argument.

    `task.means` of the sums is the report.
    """
    parts = parts or cohort_map("map")

    def evaluate(variables, examples: Examples) -> Sums:
        count = count_of(examples)
        share = -(-count // parts.multiple)
        size = min(batch_size, share)
        everything = whole(examples)

        def work(shared, i):
            variables, everything = shared
            left = jnp.clip(count - i * share, 0, share) if parts.mesh else share
            part = everything.replace(offset=i * share, size=left)
            return over(lambda batch: task.evaluate(variables, batch), part, size), ()

        members = jnp.arange(parts.multiple, dtype=jnp.int32)
        return parts.run(work, (variables, everything), members)[0]

    return evaluate


def client_evaluator(
    task: Task, batch_size: int, clients: CohortMap | None = None
) -> Callable[[Variables, FederatedData], Sums]:
    """`evaluate(variables, data) -> sums` of one model on each client's examples, stacked."""
    evaluate = personal_evaluator(task, None, batch_size, clients)
    return lambda variables, data: evaluate(variables, (), data)


def personal_evaluator(
    task: Task, algorithm: Algorithm | None, batch_size: int, clients: CohortMap | None = None
) -> Callable[[Any, Any, FederatedData], Sums]:
    """`evaluate(server, states, data)`: every client's own model on its own examples, stacked."""
    clients = clients or cohort_map("map")
    the_model: Any = lambda model, state: model
    model_of = (algorithm and algorithm.personal) or the_model

    def evaluate(server, states, data: FederatedData) -> Sums:
        def work(shared, k):
            server, states, data = shared
            mask = k < data.num_clients
            k = jnp.where(mask, k, 0)
            variables = model_of(server, client_state.row(states, k))
            own = data.client(k, mask)
            return (), over(lambda batch: task.evaluate(variables, batch), own, batch_size)

        missing = -data.num_clients % clients.multiple
        members = jnp.arange(data.num_clients + missing, dtype=jnp.int32)
        sums = clients.run(work, (server, states, data), members)[1]
        return jax.tree.map(lambda x: x[: data.num_clients], sums)

    return evaluate
