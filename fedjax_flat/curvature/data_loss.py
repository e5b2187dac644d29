"""A loss over a whole data set as a function of the parameters: value, gradient, Hessian product.

    f(w) = 1/n sum_i l_i(w) + decay / 2 ||w||^2

Sums over masked batches, divided once by n, so that uneven batches equal one big batch. A product
with the Hessian is `jax.jvp` of `jax.grad`, batch by batch in one compiled loop; the data is an
argument of the compiled functions and stays on the device.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat.data import Batch, Examples
from fedjax_flat.objective import Objective, Totals

Params = Any


class DataLoss(NamedTuple):
    """Compiled functions of the parameters."""

    totals: Callable[[Params], Totals]  # without weight decay
    value: Callable[[Params], jax.Array]
    gradient: Callable[[Params], Params]
    product: Callable[[Params, Params], Params]  # Hessian at the first times the second
    along: Callable[[Params, tuple[Params, ...], jax.Array], Totals]  # see `data_loss`
    examples: int


def data_loss(
    totals: Callable[[Params, Any], Totals], batches: Any, *, weight_decay: float = 0.0
) -> DataLoss:
    """Of `totals(params, batch)`, sums over a batch, and batches stacked along the first axis.

    `along(params, directions, points)` has the totals at params + sum_i points[:, i] directions[i],
    one after the other in one dispatch.
    """

    def over(f, batches):
        """The sum of f(batch) over all batches."""
        first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batches)
        zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(f, first))
        add = lambda total, batch: (jax.tree.map(jnp.add, total, f(batch)), None)
        return jax.lax.scan(add, zero, batches)[0]

    mask = getattr(batches, "mask", None)
    examples = int(mask.sum()) if mask is not None else _length(batches)

    def all_totals(params, batches):
        return over(lambda b: totals(params, b), batches)

    def mean(sums, tree):
        """sums / n + decay tree."""
        return jax.tree.map(lambda x, w: x / examples + weight_decay * w, sums, tree)

    def value(params, batches):
        squares = sum(jnp.sum(jnp.square(w)) for w in jax.tree.leaves(params))
        return all_totals(params, batches).loss / examples + 0.5 * weight_decay * squares

    def gradient(params, batches):
        return mean(over(lambda b: jax.grad(loss_of(b))(params), batches), params)

    def product(params, vector, batches):
        one = lambda b: jax.jvp(jax.grad(loss_of(b)), (params,), (vector,))[1]
        return mean(over(one, batches), vector)

    def along(params, directions, points, batches):
        def at(point):
            moved = params
            for i, direction in enumerate(directions):
                moved = jax.tree.map(
                    lambda w, d, i=i: w + point[i].astype(w.dtype) * d, moved, direction
                )
            return all_totals(moved, batches)

        return jax.lax.map(at, points)

    def loss_of(batch):
        return lambda params: totals(params, batch).loss

    compiled = {f.__name__: jax.jit(f) for f in (all_totals, value, gradient, product, along)}
    return DataLoss(
        totals=lambda p: compiled["all_totals"](p, batches),
        value=lambda p: compiled["value"](p, batches),
        gradient=lambda p: compiled["gradient"](p, batches),
        product=lambda p, v: compiled["product"](p, v, batches),
        along=lambda p, d, points: compiled["along"](p, d, points, batches),
        examples=examples,
    )


def of_examples(
    objective: Objective,
    examples: Examples,
    *,
    batch_size: int = 500,
    limit: int | None = None,
    weight_decay: float = 0.0,
) -> DataLoss:
    """The loss of an experiment on its first `limit` examples, in evaluation mode."""
    stacked = stacked_batches(examples, batch_size, limit)
    totals = lambda params, batch: objective.totals(params, objective.normalise(batch))
    return data_loss(totals, stacked, weight_decay=weight_decay)


def stacked_batches(examples: Examples, batch_size: int, limit: int | None = None) -> Batch:
    """Masked batches, stacked; the last one is padded with its own last example."""
    count = min(limit or len(examples.labels), len(examples.labels))
    size = min(batch_size, count)
    index = jnp.arange(-(-count // size) * size).reshape(-1, size)
    here = jnp.minimum(index, count - 1)
    images, labels = jnp.asarray(examples.images), jnp.asarray(examples.labels)
    return Batch(images[here], labels[here], index < count)


def _length(batches: Any) -> int:
    shape = jax.tree.leaves(batches)[0].shape
    return shape[0] * shape[1]
