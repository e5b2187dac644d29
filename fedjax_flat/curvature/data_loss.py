"""A loss over a whole data set as a function of the parameters: value, gradient, Hessian product.

    f(w) = 1/n sum_i l_i(w) + decay / 2 ||w||^2

Sums over masked batches, divided once by n, so that uneven batches equal one big batch. A product
with the Hessian is `jax.jvp` of `jax.grad`, batch by batch in one compiled loop. Data, n and decay
are arguments of the compiled functions: the data stays on the device, and losses of one network on
several data sets of one shape, such as every client's own, share their executables.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat import memory
from fedjax_flat.data import Batch, Examples, FederatedData
from fedjax_flat.data.federated import client_batch
from fedjax_flat.objective import Objective, Totals

Params = Any


class DataLoss(NamedTuple):
    """Compiled functions of the parameters."""

    totals: Callable[[Params], Totals]  # without weight decay
    value: Callable[[Params], jax.Array]
    gradient: Callable[[Params], Params]
    product: Callable[[Params, Params], Params]  # Hessian at the first times the second
    hessian: Callable[[Params], Callable[[Params], Params]]  # many products at one point
    along: Callable[[Params, tuple[Params, ...], jax.Array], Totals]  # see `data_loss`
    examples: int


def data_loss(
    totals: Callable[[Params, Any], Totals], batches: Any, *, weight_decay: float = 0.0
) -> DataLoss:
    """Of `totals(params, batch)`, sums over a batch, and batches stacked along the first axis.

    `hessian(params)` linearises the gradient once, if what that keeps fits into memory; products
    are then about a quarter faster. `along(params, directions, points)` has the totals at
    params + sum_i points[:, i] directions[i], one after the other in one dispatch.
    """
    mask = getattr(batches, "mask", None)
    examples = int(mask.sum()) if mask is not None else _length(batches)
    run, data = _compiled(totals), (batches, float(examples), float(weight_decay))

    def hessian(params):
        if not memory.fits(jax.eval_shape(run["linearised"], params, data)):
            return lambda vector: run["product"](params, vector, data)
        linear = run["linearised"](params, data)
        return lambda vector: run["apply"](linear, vector)

    return DataLoss(
        totals=lambda p: run["totals"](p, data),
        value=lambda p: run["value"](p, data),
        gradient=lambda p: run["gradient"](p, data),
        product=lambda p, v: run["product"](p, v, data),
        hessian=hessian,
        along=lambda p, d, points: run["along"](p, d, points, data),
        examples=examples,
    )


def of_examples(
    objective: Objective,
    examples: Examples,
    *,
    batch_size: int | None = None,
    limit: int | None = None,
    weight_decay: float = 0.0,
    precision: str = "float32",
) -> DataLoss:
    """The loss of an experiment on its first `limit` examples, in evaluation mode.

    Batches are of 100 on CPU, where their activations should stay in the cache, else of 500.
    With precision `float64`, parameters must be float64 too, and everything happens inside
    `with jax.enable_x64(True):`.
    """
    count = min(limit or len(examples.labels), len(examples.labels))
    size = min(batch_size or _batch_size(), count)
    index = jnp.arange(-(-count // size) * size).reshape(-1, size)
    here = jnp.minimum(index, count - 1)
    images, labels = jnp.asarray(examples.images), jnp.asarray(examples.labels)
    batches = Batch(images[here], labels[here], index < count)
    return _of_batches(objective, batches, weight_decay, precision)


def of_client(
    objective: Objective,
    data: FederatedData,
    client: int,
    *,
    batch_size: int | None = None,
    weight_decay: float = 0.0,
) -> DataLoss:
    """The loss of an experiment on one client's examples; the same shapes for every client."""
    size = min(batch_size or _batch_size(), data.max_size)
    position = jnp.arange(-(-data.max_size // size) * size).reshape(-1, size)
    batches = client_batch(data.client(jnp.int32(client)), position)
    return _of_batches(objective, batches, weight_decay, "float32")


def _of_batches(objective, batches: Batch, weight_decay: float, precision: str) -> DataLoss:
    return data_loss(_in_evaluation(objective, precision), batches, weight_decay=weight_decay)


@functools.lru_cache(maxsize=8)
def _in_evaluation(objective: Objective, precision: str) -> Callable[[Params, Batch], Totals]:
    """Totals of stored examples; the same function for the same objective, to compile once."""

    def totals(params, batch):
        batch = objective.normalise(batch)
        return objective.totals(params, batch._replace(images=batch.images.astype(precision)))

    return totals


@functools.lru_cache(maxsize=8)
def _compiled(totals: Callable[[Params, Any], Totals]) -> dict[str, Callable]:
    def over(f, batches):
        """The sum of f(batch) over all batches."""
        first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batches)
        zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(f, first))
        add = lambda total, batch: (jax.tree.map(jnp.add, total, f(batch)), None)
        return jax.lax.scan(add, zero, batches)[0]

    def loss_of(batch):
        return lambda params: totals(params, batch).loss

    def mean(sums, tree, examples, weight_decay):
        """sums / n + decay tree."""
        return jax.tree.map(lambda x, w: x / examples + weight_decay * w, sums, tree)

    def all_totals(params, data):
        return over(lambda b: totals(params, b), data[0])

    def value(params, data):
        _, examples, weight_decay = data
        squares = sum(jnp.sum(jnp.square(w)) for w in jax.tree.leaves(params))
        return all_totals(params, data).loss / examples + 0.5 * weight_decay * squares

    def gradient(params, data):
        batches, *constants = data
        return mean(over(lambda b: jax.grad(loss_of(b))(params), batches), params, *constants)

    def product(params, vector, data):
        batches, *constants = data
        one = lambda b: jax.jvp(jax.grad(loss_of(b)), (params,), (vector,))[1]
        return mean(over(one, batches), vector, *constants)

    def linearised(params, data):
        return jax.linearize(lambda p: gradient(p, data), params)[1]

    def along(params, directions, points, data):
        def at(point):
            moved = params
            for i, direction in enumerate(directions):
                moved = jax.tree.map(
                    lambda w, d, i=i: w + point[i].astype(w.dtype) * d, moved, direction
                )
            return all_totals(moved, data)

        return jax.lax.map(at, points)

    return {
        "totals": jax.jit(all_totals), "value": jax.jit(value), "gradient": jax.jit(gradient),
        "product": jax.jit(product), "along": jax.jit(along), "linearised": jax.jit(linearised),
        "apply": jax.jit(lambda linear, vector: linear(vector)),
    }


def _batch_size() -> int:
    return 100 if jax.default_backend() == "cpu" else 500


def _length(batches: Any) -> int:
    shape = jax.tree.leaves(batches)[0].shape
    return shape[0] * shape[1]
