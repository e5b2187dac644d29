"""A loss over a whole data set as a function of the parameters: value, gradient, Hessian product.

    f(w) = 1/n sum_i l_i(w) + decay / 2 ||w||^2

Sums over batches, divided once by n, so that uneven batches equal one big batch. A product with the
Hessian is `jax.jvp` of `jax.grad`, batch by batch in one compiled loop. Data and decay are
arguments of the compiled functions: the data stays on the device, and losses of one network on
several data sets of one shape, such as every client's own, share their executables.

`data_loss` takes any JAX loss; `of_examples` and `of_client` a task with its stored examples.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_flat import errors, memory
from fedjax_flat.data import Batch, Examples, FederatedData, count_of
from fedjax_flat.data.federated import client_batch, sum_over
from fedjax_flat.models import Variables
from fedjax_flat.tasks import Sums, Task

Params = Any


class DataLoss(NamedTuple):
    """Compiled functions of the parameters."""

    means: Callable[[Params], dict[str, jax.Array]]  # loss and score, without weight decay
    value: Callable[[Params], jax.Array]
    gradient: Callable[[Params], Params]
    product: Callable[[Params, Params], Params]  # Hessian at the first times the second
    hessian: Callable[[Params], Callable[[Params], Params]]  # many products at one point
    along: Callable[[Params, tuple[Params, ...], jax.Array], dict[str, jax.Array]]  # see below
    examples: int
    score: str  # the name of the score in the means, '' if there is none


class _Measure(NamedTuple):
    """`sums(params, batch, constants)` with loss and units, and `means(sums)`."""

    sums: Callable[[Params, Any, Any], Sums]
    means: Callable[[Sums], dict[str, jax.Array]]
    score: str = ""


class _Data(NamedTuple):
    """Batches of one shape stacked along the first axis, in one tree for each shape."""

    stacks: tuple[Any, ...]
    constants: Any
    weight_decay: float


def data_loss(
    loss: Callable[[Params, Any], jax.Array],
    data: Any,
    *,
    batch_size: int | None = None,
    weight_decay: float = 0.0,
) -> DataLoss:
    """Of `loss(params, batch)`, the mean over a batch, and any data.

    `data` is a tree of arrays with examples along the first axis, of which batches are made (100 on
    CPU, else 500, unless `batch_size` says so), or a list or another iterable of such trees, which
    are the batches; they may differ in length. `params` may be any tree: of flax.linen, of plain
    arrays, or an `nnx.State` (see `from_nnx`).
    """
    batches = _batches_of(data, batch_size)
    examples = sum(_length(b) for b in batches)
    if not examples:
        raise errors.UsageError("a loss over no examples: the data are empty.")
    prepared = _Data(_stacked(batches), (), float(weight_decay))
    return _data_loss(_scalar(loss), prepared, examples)


def from_nnx(loss: Callable[[Any, Any], jax.Array], model: Any) -> tuple[Callable, Any]:
    """(loss of (parameters, batch), parameters) of a loss of (flax.nnx module, batch)."""
    from flax import nnx

    graph, params, rest = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]
    return lambda params, batch: loss(nnx.merge(graph, params, rest), batch), params


def of_examples(
    task: Task,
    examples: Examples,
    *,
    stats: Any = (),
    batch_size: int | None = None,
    limit: int | None = None,
    weight_decay: float = 0.0,
    precision: str = "float32",
) -> DataLoss:
    """The loss of a task on its first `limit` examples, in evaluation mode with these `stats`.

    Batches are of 100 on CPU, where their activations should stay in the cache, else of 500.
    With precision `float64`, parameters must be float64 too, and everything happens inside
    `with jax.enable_x64(True):`.
    """
    count = min(limit or count_of(examples), count_of(examples))
    size = min(batch_size or _batch_size(), count)
    index = jnp.arange(-(-count // size) * size).reshape(-1, size)
    here = jnp.minimum(index, count - 1)
    inputs, labels = jax.tree.map(lambda x: jnp.asarray(x[:count])[here], examples)
    stored = Batch(inputs, labels, index < count)
    return _of_batches(task, stored, stats, weight_decay, precision)


def of_client(
    task: Task,
    data: FederatedData,
    client: int,
    *,
    stats: Any = (),
    batch_size: int | None = None,
    weight_decay: float = 0.0,
    precision: str = "float32",
) -> DataLoss:
    """The loss of a task on one client's examples; the same shapes for every client."""
    if data.groups is not None:
        raise errors.UsageError("the loss of a group of clients: ask for each client's by itself.")
    size = min(batch_size or _batch_size(), data.max_size)
    position = jnp.arange(-(-data.max_size // size) * size).reshape(-1, size)
    stored = client_batch(data.client(jnp.int32(client)), position)
    return _of_batches(task, stored, stats, weight_decay, precision)


def _of_batches(task: Task, stored: Batch, stats, weight_decay: float, precision: str) -> DataLoss:
    prepared = _Data((stored,), stats, float(weight_decay))
    return _data_loss(_in_evaluation(task, precision), prepared, int(stored.mask.sum()))


def _data_loss(measure: _Measure, data: _Data, examples: int) -> DataLoss:
    """`hessian(params)` linearises the gradient once, if what that keeps fits into memory; products
    are then about a quarter faster. `along(params, directions, points)` has the means at
    params + sum_i points[:, i] directions[i], one after the other in one dispatch.
    """
    run = _compiled(measure)

    def hessian(params):
        if not memory.fits(jax.eval_shape(run["linearised"], params, data)):
            return lambda vector: run["product"](params, vector, data)
        linear = run["linearised"](params, data)
        return lambda vector: run["apply"](linear, vector)

    return DataLoss(
        means=lambda p: run["means"](p, data),
        value=lambda p: run["value"](p, data),
        gradient=lambda p: run["gradient"](p, data),
        product=lambda p, v: run["product"](p, v, data),
        hessian=hessian,
        along=lambda p, d, points: run["along"](p, d, points, data),
        examples=examples,
        score=measure.score,
    )


@functools.lru_cache(maxsize=8)
def _in_evaluation(task: Task, precision: str) -> _Measure:
    """Of stored examples; the same functions for the same task, to compile once."""

    def wide(x):
        return x.astype(precision) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def sums(params, stored, stats):
        batch = task.prepare(stored, None)
        batch = batch._replace(inputs=jax.tree.map(wide, batch.inputs))
        return task.measure(task.forward(Variables(params, stats), batch, None), batch)

    return _Measure(sums, task.means, task.score)


@functools.lru_cache(maxsize=8)
def _scalar(loss: Callable[[Params, Any], jax.Array]) -> _Measure:
    def sums(params, batch, constants):
        del constants
        value, n = loss(params, batch), float(_length(batch))
        if jnp.shape(value):
            raise errors.UsageError(
                f"the loss has shape {jnp.shape(value)}: expected a number, the batch's mean."
            )
        return {"loss": n * value, "units": jnp.asarray(n, value.dtype)}

    return _Measure(sums, lambda sums: {"loss": sums["loss"] / sums["units"]})


@functools.lru_cache(maxsize=8)
def _compiled(measure: _Measure) -> dict[str, Callable]:
    def over(f, data):
        """The sum of f(batch) over all batches."""
        total = None
        for stack in data.stacks:
            count = jax.tree.leaves(stack)[0].shape[0]
            one = lambda i, stack=stack: f(jax.tree.map(lambda x: x[i], stack))
            part = sum_over(one, count)
            total = part if total is None else optax.tree.add(total, part)
        return total

    def loss_of(batch, data):
        """params -> (loss, units), sums over a batch."""

        def loss(params):
            sums = measure.sums(params, batch, data.constants)
            return sums["loss"], sums["units"]

        return loss

    def mean(total, tree, data):
        """sums / n + decay tree."""
        sums, n = total
        return jax.tree.map(lambda x, w: x / n.astype(x.dtype) + data.weight_decay * w, sums, tree)

    def means(params, data):
        return measure.means(over(lambda b: measure.sums(params, b, data.constants), data))

    def value(params, data):
        squares = sum(jnp.sum(jnp.square(w)) for w in jax.tree.leaves(params))
        return means(params, data)["loss"] + 0.5 * data.weight_decay * squares

    def gradient(params, data):
        one = lambda b: jax.grad(loss_of(b, data), has_aux=True)(params)
        return mean(over(one, data), params, data)

    def product(params, vector, data):
        def one(b):
            gradient = jax.grad(loss_of(b, data), has_aux=True)
            _, moved, units = jax.jvp(gradient, (params,), (vector,), has_aux=True)
            return moved, units

        return mean(over(one, data), vector, data)

    def linearised(params, data):
        return jax.linearize(lambda p: gradient(p, data), params)[1]

    def along(params, directions, points, data):
        def at(point):
            moved = params
            for i, direction in enumerate(directions):
                moved = jax.tree.map(
                    lambda w, d, i=i: w + point[i].astype(w.dtype) * d, moved, direction
                )
            return means(moved, data)

        return jax.lax.map(at, points)

    return {
        "means": jax.jit(means), "value": jax.jit(value), "gradient": jax.jit(gradient),
        "product": jax.jit(product), "along": jax.jit(along), "linearised": jax.jit(linearised),
        "apply": jax.jit(lambda linear, vector: linear(vector)),
    }


def _batches_of(data: Any, batch_size: int | None) -> list[Any]:
    """A list of batches, from batches or from whole arrays."""
    is_tree = isinstance(data, dict | tuple) or hasattr(data, "shape")
    if not is_tree and isinstance(data, Iterable):
        return [jax.tree.map(jnp.asarray, batch) for batch in data]
    count = _length(data)
    size = batch_size or _batch_size()
    cut = lambda start: jax.tree.map(lambda x: jnp.asarray(x[start : start + size]), data)
    return [cut(start) for start in range(0, count, size)]


def _stacked(batches: list[Any]) -> tuple[Any, ...]:
    """Batches of one shape as one tree."""
    shapes: dict[Any, list[Any]] = {}
    for batch in batches:
        leaves, structure = jax.tree.flatten(batch)
        shapes.setdefault((structure, *((x.shape, x.dtype) for x in leaves)), []).append(batch)
    return tuple(jax.tree.map(lambda *x: jnp.stack(x), *same) for same in shapes.values())


def _batch_size() -> int:
    return 100 if jax.default_backend() == "cpu" else 500


def _length(batch: Any) -> int:
    lengths = {np.shape(x)[0] for x in jax.tree.leaves(batch) if np.ndim(x)}
    if len(lengths) != 1:
        raise errors.UsageError(
            f"arrays of {sorted(lengths)} examples in one batch: expected one number, along the "
            "first axis."
        )
    return lengths.pop()
