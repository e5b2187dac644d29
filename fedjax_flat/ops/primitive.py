"""Operations with a form of their own on CPU.

A primitive is opaque to differentiation, so rules can keep derivatives of any order inside a small
set of operations that are known to be fast; it lowers to `cpu` there and to `default` elsewhere.

Primitives are made of JAX internals, all of them in `_primitive`. FEDJAX_FLAT_OPS=lax does without:
every operation is then its `default`, which JAX differentiates and batches as any other code. That
is also what happens, with a warning, where this version of JAX lacks the internals.
"""

import functools
import os
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_flat import errors

SWITCH = "FEDJAX_FLAT_OPS"


class Operation(Protocol):
    """A primitive or, without them, a plain function."""

    def bind(self, *arrays, **static) -> jax.Array: ...


def primitive(
    name: str,
    default: Callable,
    transposes: Sequence[Callable | None],
    *,
    cpu: Callable | None = None,
    batch: Callable | None = None,
) -> Operation:
    """An operation whose `bind(*arrays, **static)` is `default(*arrays, **static)`.

    `transposes` has one entry per array: None, or, for an array in which the operation is linear,
    `transpose(cotangent, *arrays, **static)`, which knows of that array only its `aval`.
    `batch(primitive, arrays, axes, **static)` returns (result, axis); without it, every array and
    the result have examples first, and a batch joins these.
    """
    return _make(name, default, transposes, cpu, batch or _join_examples)


def _primitive(name, default, transposes, cpu, batch):
    from jax.extend import core
    from jax.interpreters import ad, batching, mlir

    p = core.Primitive(name)

    def abstract_eval(*arrays, **static):
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
        out = jax.eval_shape(lambda *a: default(*a, **static), *shapes)
        return jax.core.ShapedArray(out.shape, out.dtype)

    @functools.lru_cache
    def compiled(**static):
        return jax.jit(functools.partial(p.bind, **static))

    def tangent(i, t, *arrays, **static):
        return p.bind(*arrays[:i], t, *arrays[i + 1 :], **static)

    def transpose(cotangent, *arrays, **static):
        if isinstance(cotangent, ad.Zero):
            return [None] * len(arrays)
        return [
            rule(cotangent, *arrays, **static) if ad.is_undefined_primal(x) else None
            for rule, x in zip(transposes, arrays, strict=True)
        ]

    p.def_impl(lambda *arrays, **static: compiled(**static)(*arrays))
    p.def_abstract_eval(abstract_eval)
    mlir.register_lowering(p, mlir.lower_fun(default, multiple_results=False))
    if cpu:
        mlir.register_lowering(p, mlir.lower_fun(cpu, multiple_results=False), platform="cpu")
    batching.primitive_batchers[p] = functools.partial(batch, p)
    ad.defjvp(p, *(rule and functools.partial(tangent, i) for i, rule in enumerate(transposes)))
    ad.primitive_transposes[p] = transpose
    return p


def _plain(name, default, transposes, cpu, batch):
    del name, transposes, cpu, batch
    return types.SimpleNamespace(bind=default)


def accumulator(x: jax.Array):
    """The type of sums: float32 for bfloat16 operands, else their own."""
    return jnp.float32 if x.dtype == jnp.bfloat16 else x.dtype


def _join_examples(p, arrays, axes, **static):
    size = next(x.shape[a] for x, a in zip(arrays, axes, strict=True) if a is not None)
    repeat = lambda x: jnp.broadcast_to(x[None], (size, *x.shape))
    first = [
        repeat(x) if a is None else jnp.moveaxis(x, a, 0) for x, a in zip(arrays, axes, strict=True)
    ]
    out = p.bind(*(lax.collapse(x, 0, 2) for x in first), **static)
    return out.reshape(size, -1, *out.shape[1:]), 0


def _choose(name: str) -> Callable:
    """What makes the operations: the switch's choice, if a primitive can be made and traced."""
    make = errors.lookup(SWITCH, name, {"primitives": _primitive, "lax": _plain})
    try:
        trial = make("trial", lax.neg, [lambda ct, x: lax.neg(ct)], lax.neg, _join_examples)
        derivative = lambda x: jax.vjp(jax.vmap(trial.bind), x)[1](x)
        jax.eval_shape(derivative, jax.ShapeDtypeStruct((1, 1), jnp.float32))  # starts no backend
    except (ImportError, AttributeError, TypeError) as missing:
        warnings.warn(
            f"jax {jax.__version__} lacks internals that the fast operations are made of "
            f"({missing}). Plain lax operations are used instead: the results are the same, but "
            f"convolutions train many times slower on CPU. {SWITCH}=lax asks for them without "
            "this warning; setup.cfg names the versions of jax that were tried.",
            stacklevel=2,
        )
        return _plain
    return make


_make = _choose(os.environ.get(SWITCH, "primitives"))
