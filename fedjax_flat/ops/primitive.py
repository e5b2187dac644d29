"""Operations with a form of their own on CPU.

A primitive is opaque to differentiation, so rules can keep derivatives of any order inside a small
set of operations that are known to be fast; it lowers to `cpu` there and to `default` elsewhere.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import batching, mlir


def primitive(name: str, default: Callable, cpu: Callable | None = None, batch=None):
    """`default(*arrays, **static)` as a primitive; its derivatives are the caller's.

    `batch(primitive, arrays, axes, **static)` returns (result, axis); without it, every array and
    the result have examples first, and a batch joins these.
    """
    p = core.Primitive(name)

    def abstract_eval(*arrays, **static):
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
        out = jax.eval_shape(lambda *a: default(*a, **static), *shapes)
        return jax.core.ShapedArray(out.shape, out.dtype)

    @functools.lru_cache
    def compiled(**static):
        return jax.jit(functools.partial(p.bind, **static))

    rule = batch or _join_examples
    p.def_impl(lambda *arrays, **static: compiled(**static)(*arrays))
    p.def_abstract_eval(abstract_eval)
    mlir.register_lowering(p, mlir.lower_fun(default, multiple_results=False))
    if cpu:
        mlir.register_lowering(p, mlir.lower_fun(cpu, multiple_results=False), platform="cpu")
    batching.primitive_batchers[p] = lambda arrays, axes, **static: rule(p, arrays, axes, **static)
    return p


def _join_examples(p, arrays, axes, **static):
    size = next(x.shape[a] for x, a in zip(arrays, axes, strict=True) if a is not None)
    repeat = lambda x: jnp.broadcast_to(x[None], (size, *x.shape))
    first = [
        repeat(x) if a is None else jnp.moveaxis(x, a, 0) for x, a in zip(arrays, axes, strict=True)
    ]
    out = p.bind(*(lax.collapse(x, 0, 2) for x in first), **static)
    return out.reshape(size, -1, *out.shape[1:]), 0
