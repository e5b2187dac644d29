"""Loss and accuracy on a whole split, or on every client's own examples.

Both are sums over masked batches, taken by the same cohort map as training: in sequence on one
device, shared among several.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_flat.data import Batch, Examples, FederatedData
from fedjax_flat.data.federated import client_batch
from fedjax_flat.engine.cohort import CohortMap, cohort_map
from fedjax_flat.objective import Objective, Totals


def evaluator(
    objective: Objective, batch_size: int, batches: CohortMap | None = None
) -> Callable[[Any, Examples], Totals]:
    """`evaluate(params, examples) -> Totals`; jit it, and pass the examples as an argument."""
    batches = batches or cohort_map("map")

    def evaluate(params, examples: Examples) -> Totals:
        examples = jax.tree.map(jnp.asarray, examples)
        count = examples.labels.shape[0]
        batch = min(batch_size, count)

        def work(shared, i):
            params, examples = shared
            index = i * batch + jnp.arange(batch)
            here = jnp.minimum(index, count - 1)
            stored = Batch(examples.images[here], examples.labels[here], index < count)
            return objective.totals(params, objective.normalise(stored)), ()

        return batches.run(work, (params, examples), _numbers(-(-count // batch), batches))[0]

    return evaluate


def client_evaluator(
    objective: Objective, batch_size: int, clients: CohortMap | None = None
) -> Callable[[Any, FederatedData], Totals]:
    """`evaluate(params, data) -> Totals` of one model on each client's examples, stacked over K."""
    clients = clients or cohort_map("map")

    def evaluate(params, data: FederatedData) -> Totals:
        def work(shared, k):
            params, data = shared
            mask = k < data.num_clients
            client = data.client(jnp.where(mask, k, 0), mask)

            def body(i, totals):
                batch = client_batch(client, i * batch_size + jnp.arange(batch_size))
                return totals + objective.totals(params, objective.normalise(batch))

            steps = -(-client.size // batch_size)
            return (), jax.lax.fori_loop(0, steps, body, Totals.zero())

        totals = clients.run(work, (params, data), _numbers(data.num_clients, clients))[1]
        return jax.tree.map(lambda x: x[: data.num_clients], totals)

    return evaluate


def _numbers(count: int, over: CohortMap) -> jax.Array:
    """0 .. count - 1, and on to a multiple of the number of devices."""
    return jnp.arange(-(-count // over.multiple) * over.multiple)
