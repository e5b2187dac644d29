"""A network as two pure functions, and any flax module as one."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_flat import errors
from fedjax_flat.models.layers import AuxiliaryHead, BatchNorm, EndOfBlock
from fedjax_flat.models.units import Units, units_of, widths_of

CLASSIFIER = "classifier"  # the name of a model's last module: what it reads are the features


class Variables(NamedTuple):
    """A model: what is learned, and what is measured (BatchNorm's mean and variance)."""

    params: Any
    stats: Any = ()


class Clusters(NamedTuple):
    """A model for each cluster of clients, stacked."""

    models: Variables


class Outputs(NamedTuple):
    """Of a network: `features` are what the classifier read, () where no module has that name.

    `stats` are the statistics after this batch: those before it, unless in training mode. `blocks`
    are the values at the ends of the network's blocks (`layers.EndOfBlock`), in their order, and
    `auxiliary` the logits of heads beside the classifier (`layers.AuxiliaryHead`), in training mode
    only.
    """

    logits: Any
    features: Any = ()
    stats: Any = ()
    blocks: tuple[Any, ...] = ()
    auxiliary: tuple[Any, ...] = ()


AtBlocks = Callable[[int, Any], Any]


class Model(NamedTuple):
    """`init(key) -> Variables`; `apply(variables, inputs, key=None, mask=None, at_blocks=None)`.

    A key switches training mode on (dropout, batch statistics); without one the network is
    evaluated. Rows where `mask` is False are padding and count in no statistic. The network goes on
    with `at_blocks(i, x)` in place of the value x at the end of block i; what led to a value that
    is replaced is not computed. `inputs` are the shapes and types of what it reads, batch first.
    Where there are `units`, `apply` takes variables of a network with fewer of them in its hidden
    layers, too.
    """

    init: Callable[[jax.Array], Variables]
    apply: Callable[..., Outputs]
    inputs: Any = None
    units: Callable[[], Units | None] = lambda: None  # if widths of hidden layers can be chosen


PRECISIONS = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
STATISTICS = ("averaged", "own", "layers", "frozen")


def from_linen(
    module: nn.Module, inputs: Any, precision: str = "float32", *, frozen_stats: bool = False,
    by_batch: bool = False,
) -> Model:
    """Any flax module called as `module(inputs, train=...)`, or with `mask=` as well.

    `inputs` is the shape of one example, or a tree of `jax.ShapeDtypeStruct` with a batch axis.
    With precision `bfloat16` the inputs, and so the layers of `models.layers`, are bfloat16; sums,
    parameters, gradients, logits and loss are float32. With `frozen_stats` training does not move
    the statistics, and `models.layers.BatchNorm` normalises by them. With `by_batch` it normalises
    by the batch in evaluation, too, whose statistics `Outputs.stats` then are.
    """
    dtype = errors.lookup("precision", precision, PRECISIONS)
    takes = _parameters(module)
    if isinstance(inputs, tuple) and all(isinstance(n, int) for n in inputs):
        inputs = jax.ShapeDtypeStruct((1, *inputs), jnp.float32)
    if dtype == jnp.bfloat16 and not any(
        jnp.issubdtype(s.dtype, jnp.floating) for s in jax.tree.leaves(inputs)
    ):
        raise errors.UsageError(
            f"precision bfloat16 would change nothing: {type(module).__name__} reads whole "
            "numbers, and layers compute in the type of their inputs. Leave it at float32."
        )

    def init(key, module=module):
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), inputs)
        made = dict(module.init(key, zeros))
        params = made.pop("params", {})
        return Variables(params, made or ())

    units = functools.cache(lambda: _chain(module, init))
    full = functools.cache(lambda: _shapes(_shape_of(init).params))

    def fitting(params):
        if not hasattr(module, "hidden") or _shapes(params) == full():
            return module
        structure = units()
        return module.clone(hidden=widths_of(structure, params)) if structure else module

    def apply(variables, inputs, key=None, mask=None, at_blocks: AtBlocks | None = None):
        if dtype == jnp.bfloat16:
            narrow = lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
            inputs = jax.tree.map(narrow, inputs)
        train, rngs = key is not None, None if key is None else {"dropout": key}
        stats = variables.stats
        options = {"mask": mask} if "mask" in takes else {}
        measures = bool(by_batch and stats and not train)
        moves = measures or bool(train and stats and not frozen_stats)
        if moves and "batch_stats" in stats and "mask" not in takes:
            raise errors.UsageError(
                f"{type(module).__name__} has BatchNorm but takes no mask=, so that padding would "
                "count in its statistics: expected __call__(self, x, *, train=False, mask=None), "
                "handed on to models.layers.BatchNorm(...)(x, train=train, mask=mask), or to "
                "flax's nn.BatchNorm as its mask."
            )
        read: list[Any] = []
        blocks: list[Any] = []
        auxiliary: list[Any] = []

        def watch(call, args, kwargs, context):
            if context.method_name == "__call__" and isinstance(context.module, EndOfBlock):
                blocks.append(at_blocks(len(blocks), args[0]) if at_blocks else args[0])
                return blocks[-1]
            if context.method_name == "__call__" and isinstance(context.module, AuxiliaryHead):
                auxiliary.append(call(*args, **kwargs))
                return auxiliary[-1]
            if measures and isinstance(context.module, BatchNorm):
                return call(*args, **{**kwargs, "train": True, "momentum": 1.0})
            if context.module.name == CLASSIFIER and context.method_name == "__call__":
                read.append(args[0])
            return call(*args, **kwargs)

        network = fitting(variables.params)
        with nn.intercept_methods(watch):
            logits: Any = network.apply(
                {"params": variables.params, **(stats or {})}, inputs, train=train, rngs=rngs,
                mutable=list(stats) if moves else False, **options,
            )
        if moves:
            logits, stats = logits[0], dict(logits[1])
        if dtype == jnp.bfloat16:
            logits, auxiliary = jax.tree.map(lambda x: x.astype(jnp.float32), (logits, auxiliary))
        heads = tuple(auxiliary) if train else ()
        return Outputs(logits, read[-1] if read else (), stats, tuple(blocks), heads)

    return Model(init, apply, inputs, units)


def _shape_of(init: Callable[..., Variables], *arguments: Any) -> Variables:
    return jax.eval_shape(lambda: init(jax.random.key(0), *arguments))


def _shapes(params: Any) -> list[tuple[int, ...]]:
    return [x.shape for x in jax.tree.leaves(params)]


def _chain(module: nn.Module, init: Callable[..., Variables]) -> Units | None:
    """The units of a module whose field `hidden` has the widths of its hidden layers."""
    hidden = getattr(module, "hidden", None)
    if not isinstance(hidden, tuple | list) or not all(isinstance(n, int) for n in hidden):
        return None
    return units_of(lambda widths: _shape_of(init, module.clone(hidden=widths)), tuple(hidden))


def _parameters(module: nn.Module) -> set[str]:
    parameters = inspect.signature(type(module).__call__).parameters
    if "train" not in parameters and not any(
        p.kind is p.VAR_KEYWORD for p in parameters.values()
    ):
        raise errors.UsageError(
            f"{type(module).__name__}.__call__ takes {', '.join(list(parameters)[1:])}, but no "
            "train=: expected __call__(self, x, *, train=False), True while a client trains."
        )
    return set(parameters)


def num_parameters(params: Any) -> int:
    """How many floats a model is."""
    return sum(x.size for x in jax.tree.leaves(params))
