"""The task's report on a whole split, or on every client's own examples.

Both are sums over masked batches, taken by the same cohort map as training: in sequence on one
device, shared among several, where each takes a part of the split. A split that is searched as a
whole (`Task.search`) is embedded batch by batch, on one device.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_flat.algorithms import Algorithm
from fedjax_flat.data import (
    Batch,
    Examples,
    FederatedData,
    count_of,
    on_device,
    over,
    whole,
)
from fedjax_flat.data.federated import client_batch
from fedjax_flat.engine import client_state
from fedjax_flat.engine.cohort import CohortMap, cohort_map
from fedjax_flat.models import Variables
from fedjax_flat.parts import put, take
from fedjax_flat.tasks import Sums, Task, among, restricted
from fedjax_flat.tasks.base import masked_sum


def evaluator(
    task: Task, batch_size: int, parts: CohortMap | None = None
) -> Callable[[Variables, Examples], Sums]:
    """`evaluate(variables, examples) -> sums`; jit it, and pass the examples as an argument.

    `task.means` of the sums is the report. Of a task that searches, it is `searcher`'s.
    """
    return _summed(task.evaluate, batch_size, parts)


def searcher(
    task: Task, batch_size: int, block: int = 20
) -> Callable[[Variables, Examples], Sums]:
    """`evaluate(variables, examples) -> sums` of a task that searches, not to be compiled.

    Examples on the host are put on the device `block` batches at a time.
    """
    search = task.search
    assert search

    @jax.jit
    def embed(variables, examples):
        count = count_of(examples)
        size = min(batch_size, count)
        everything = whole(examples)

        def one(i):
            positions = i * size + jnp.arange(size, dtype=jnp.int32)
            batch = task.prepare(client_batch(everything, positions), None)
            outputs = task.forward(variables, batch, None)
            return task.measure(outputs, batch), outputs.logits

        sums, found = jax.lax.map(one, jnp.arange(-(-count // size), dtype=jnp.int32))
        sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)
        return sums, found.reshape(-1, found.shape[-1])[:count]

    def evaluate(variables, examples):
        step = block * batch_size
        put = lambda x: x if isinstance(x, jax.Array) else on_device(x)
        cut = lambda start: jax.tree.map(lambda x: put(x[start : start + step]), examples)
        done = [embed(variables, cut(start)) for start in range(0, count_of(examples), step)]
        sums = jax.tree.map(lambda *parts: sum(parts), *(sums for sums, _ in done))
        found = jnp.concatenate([embeddings for _, embeddings in done])
        return sums | search(found, jax.device_get(examples.labels))

    return evaluate


def _summed(
    measure: Callable[[Variables, Batch], Any], batch_size: int, parts: CohortMap | None
) -> Callable[[Variables, Examples], Any]:
    """The sum of measure(variables, stored batch) over all examples."""
    parts = parts or cohort_map("map")

    def run(variables, examples: Examples) -> Any:
        count = count_of(examples)
        share = -(-count // parts.multiple)
        size = min(batch_size, share)
        everything = whole(examples)

        def work(shared, i):
            variables, everything = shared
            left = jnp.clip(count - i * share, 0, share) if parts.mesh else share
            part = everything.replace(offset=i * share, size=left)
            return over(lambda batch: measure(variables, batch), part, size), ()

        members = jnp.arange(parts.multiple, dtype=jnp.int32)
        return parts.run(work, (variables, everything), members)[0]

    return run


def adapter(
    task: Task, batch_size: int, parts: CohortMap | None = None
) -> Callable[[Variables, Examples], Variables]:
    """`adapt(variables, examples)`: the same model with BatchNorm's statistics of these examples.

    AdaBN (Li et al., "Revisiting batch normalization for practical domain adaptation", 2016): what
    is learned stays, what is measured becomes the domain's. `task` has a network that normalises
    `by_batch`. Of batches b of n_b examples, with means m_b and variances v_b,

        mean = sum n_b m_b / n,    variance = sum n_b (v_b + m_b^2) / n - mean^2

    which is exact for the first layer, and for all when the examples are one batch; otherwise a
    layer sees what the layers before made of its batch, as in training.
    """

    def measure(variables, stored):
        batch = task.prepare(stored, None)
        stats = task.forward(variables, batch, None).stats
        n = jnp.sum(batch.mask.astype(jnp.float32))
        values = take(stats, lambda name: name.endswith(("/mean", "/var")))
        means = {name: n * x for name, x in values.items() if name.endswith("/mean")}
        squares = {
            name: n * (x + jnp.square(values[name.removesuffix("var") + "mean"]))
            for name, x in values.items() if name.endswith("/var")
        }
        return n, means, squares

    total = _summed(measure, batch_size, parts)

    def adapt(variables, examples):
        n, means, squares = total(variables, examples)
        means = {name: x / n for name, x in means.items()}
        variances = {
            name: x / n - jnp.square(means[name.removesuffix("var") + "mean"])
            for name, x in squares.items()
        }
        return variables._replace(stats=put(variables.stats, means | variances))

    return adapt


def in_blocks(
    evaluate: Callable[[Variables, Examples], Sums], block: int
) -> Callable[[Variables, Examples], Sums]:
    """The same for examples on the host, of which `block` at a time are put on the device."""

    def run(variables, examples):
        if all(isinstance(x, jax.Array) for x in jax.tree.leaves(examples)):
            return evaluate(variables, examples)
        cut = lambda start: jax.tree.map(lambda x: x[start : start + block], examples)
        sums = [
            evaluate(variables, on_device(cut(start)))
            for start in range(0, count_of(examples), block)
        ]
        return jax.tree.map(lambda *parts: sum(parts), *sums)

    return run


def _observed(task: Task, variables: Variables, stored: Batch) -> Sums:
    """The task's sums and, of an array of outputs, their L2 norms, summed."""
    batch = task.prepare(stored, None)
    outputs = task.forward(variables, batch, None)
    sums = task.measure(outputs, batch)
    if not isinstance(outputs.logits, jax.Array):
        return sums
    norms = jnp.linalg.norm(outputs.logits.astype(jnp.float32), axis=-1)
    mask = jnp.broadcast_to(batch.mask.reshape(-1, *(1,) * (norms.ndim - 1)), norms.shape)
    return sums | {
        "output_norm": masked_sum(norms, mask), "outputs": masked_sum(jnp.ones_like(norms), mask)
    }


def client_evaluator(
    task: Task, batch_size: int, clients: CohortMap | None = None
) -> Callable[[Variables, FederatedData], Sums]:
    """`evaluate(variables, data) -> sums` of one model on each client's examples, stacked."""
    evaluate = personal_evaluator(task, None, batch_size, clients)

    def everyone(variables, data):
        return evaluate(variables, (), data, jnp.arange(data.num_clients, dtype=jnp.int32))

    return everyone


def personal_evaluator(
    task: Task, algorithm: Algorithm | None, batch_size: int, clients: CohortMap | None = None
) -> Callable[[Any, Any, FederatedData, jax.Array], Sums]:
    """`evaluate(server, states, data, chosen)`: of these clients, each one's own model, stacked.

    A number below 0 stands for no client. Where data say which classes clients have, those are the
    ones that a client's own model tells apart.
    """
    clients = clients or cohort_map("map")
    the_model: Any = lambda model, state: model
    model_of = (algorithm and algorithm.personal) or the_model

    def evaluate(server, states, data: FederatedData, chosen: jax.Array) -> Sums:
        def work(shared, k):
            server, states, data = shared
            mask = k >= 0
            k = jnp.where(mask, k, 0)
            variables = model_of(server, client_state.row(states, k))
            own = data.client(k, mask)
            pruned = algorithm is not None and own.classes is not None
            here = restricted(task, own.classes) if pruned else task
            return (), over(lambda batch: _observed(here, variables, batch), own, batch_size)

        count = chosen.shape[0]
        members = jnp.pad(chosen, (0, -count % clients.multiple), constant_values=-1)
        sums = clients.run(work, (server, states, data), members)[1]
        return jax.tree.map(lambda x: x[:count], sums)

    return evaluate


def class_evaluator(
    task: Task, algorithm: Algorithm, batch_size: int, clients: CohortMap | None = None
) -> Callable[[Any, Any, FederatedData, jax.Array, Examples], Sums]:
    """`evaluate(server, states, data, chosen, examples)`: these clients' models on all of them.

    Stacked over clients: the task's sums, and of each class how many there are and how many of
    them the model gets right.
    """
    clients = clients or cohort_map("map")
    model_of = algorithm.personal
    assert model_of

    def evaluate(server, states, data: FederatedData, chosen: jax.Array, examples: Examples):
        def work(shared, k):
            server, states, data, everything = shared
            variables = model_of(server, client_state.row(states, k))
            classes = data.client(k).classes
            here = task if classes is None else restricted(task, classes)

            def of_batch(stored):
                batch = task.prepare(stored, None)
                outputs = task.forward(variables, batch, None)
                logits = outputs.logits if classes is None else among(outputs.logits, classes)
                right = jnp.argmax(logits, axis=-1).astype(batch.labels.dtype) == batch.labels
                each = jax.nn.one_hot(batch.labels, logits.shape[-1], dtype=jnp.float32)
                times = lambda mask: each * mask.astype(jnp.float32).reshape(-1, 1)
                return {
                    "sums": here.measure(outputs, batch),
                    "examples": jnp.sum(times(batch.mask), axis=0),
                    "right": jnp.sum(times(batch.mask & right), axis=0),
                }

            return (), over(of_batch, everything, batch_size)

        count = chosen.shape[0]
        members = jnp.pad(chosen, (0, -count % clients.multiple))
        found = clients.run(work, (server, states, data, whole(examples)), members)[1]
        return jax.tree.map(lambda x: x[:count], found)

    return evaluate
