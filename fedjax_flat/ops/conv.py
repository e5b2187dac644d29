"""A convolution that stays fast inside loops on XLA:CPU and is closed under differentiation.

XLA:CPU recognises only plain NHWC/HWIO convolutions inside a while body; the filter and input
gradients that JAX writes are something else there, and run 20 to 70 times slower. So the three
bilinear maps

    output(x, w),   input_grad(g, w),   filter_grad(x, g)

are primitives of their own. Each is the transpose of another, so `jvp`, `vjp`, `jvp(grad)` and
`grad(grad)` never leave the set, and each lowers to one plain NHWC/HWIO convolution.

Stride 1 and VALID padding, which is what the papers' CNN needs.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir


def conv(x: jax.Array, w: jax.Array) -> jax.Array:
    """VALID convolution of x (N, H, W, C) with w (h, w, C, O)."""
    if x.ndim != 4 or w.ndim != 4 or x.shape[3] != w.shape[2]:
        raise ValueError(
            f"conv: images of shape {x.shape} with filters of shape {w.shape}; expected "
            "(N, H, W, C) with (h, w, C, O)."
        )
    if x.shape[1] < w.shape[0] or x.shape[2] < w.shape[1]:
        raise ValueError(f"conv: filters {w.shape[:2]} are larger than images {x.shape[1:3]}.")
    return _output_p.bind(x, w)


def _plain(x, w):
    return lax.conv_general_dilated(
        x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _input_grad(g, w):
    kh, kw = w.shape[:2]
    g = jnp.pad(g, ((0, 0), (kh - 1, kh - 1), (kw - 1, kw - 1), (0, 0)))
    return _plain(g, jnp.transpose(w[::-1, ::-1], (0, 1, 3, 2)))


def _filter_grad(x, g):
    dw = _plain(jnp.transpose(x, (3, 1, 2, 0)), jnp.transpose(g, (1, 2, 0, 3)))
    return jnp.transpose(dw, (1, 2, 0, 3))


def _primitive(name, fn):
    primitive = core.Primitive(name)
    primitive.def_impl(functools.partial(jax.jit(fn)))

    def abstract_eval(a, b):
        out = jax.eval_shape(fn, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (a, b)))
        return jax.core.ShapedArray(out.shape, out.dtype)

    def batch(args, dims):
        # A loop over clients, because per-client weights would become a grouped convolution.
        a, b = (x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True))
        if dims[0] is None:
            return lax.map(lambda y: primitive.bind(a, y), b), 0
        if dims[1] is None:
            return lax.map(lambda y: primitive.bind(y, b), a), 0
        return lax.map(lambda t: primitive.bind(*t), (a, b)), 0

    primitive.def_abstract_eval(abstract_eval)
    mlir.register_lowering(primitive, mlir.lower_fun(fn, multiple_results=False))
    batching.primitive_batchers[primitive] = batch
    return primitive


_output_p = _primitive("conv_output", _plain)
_input_grad_p = _primitive("conv_input_grad", _input_grad)
_filter_grad_p = _primitive("conv_filter_grad", _filter_grad)
ad.defbilinear(
    _output_p,
    lambda ct, x, w: _input_grad_p.bind(ct, w),
    lambda ct, x, w: _filter_grad_p.bind(x, ct),
)
ad.defbilinear(
    _input_grad_p,
    lambda ct, g, w: _output_p.bind(ct, w),
    lambda ct, g, w: _filter_grad_p.bind(ct, g),
)
ad.defbilinear(
    _filter_grad_p,
    lambda ct, x, g: _input_grad_p.bind(g, ct),
    lambda ct, x, g: _output_p.bind(x, ct),
)
