"""Sums over an image, per example and channel, that are cheap on CPU, and their transposes.

XLA:CPU fuses a sum with whatever computes its summands, and then computes all of that anew for
every channel: a fifth of a step for the bias of a layer without pooling on 28 x 28 images. A
product with a vector of ones is the same sum over values computed once. Hence primitives, closed
under transposition, so that derivatives of any order keep this form:

    spread(v)     (N, C) -> (N, H, W, C), the same over the image
    total(x)      (N, H, W, C) -> (N, C), the sum over the image; transpose of spread
    inner(x, y)   total(x y); its transposes are products with something spread

Both sums are compiled where kernels.py has compiled kernels, of float32: inner without the product
in memory. On other platforms they lower to XLA's own broadcast and sums.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_flat.ops import kernels
from fedjax_flat.ops.primitive import Operation, accumulator, primitive


def spread(values: jax.Array, image: Sequence[int]) -> jax.Array:
    """(N, C) -> (N, H, W, C), the same over the image."""
    return _spread_p.bind(values, image=tuple(image))


def total(x: jax.Array) -> jax.Array:
    """(N, H, W, C) -> (N, C), the sum over the image."""
    return _total_p.bind(x)


def inner(x: jax.Array, y: jax.Array) -> jax.Array:
    """(N, H, W, C) twice -> (N, C), the sum of products over the image."""
    return _inner_p.bind(x, y)


def _spread(values, image):
    n, channels = values.shape
    # In the type of sums, because without primitives JAX makes the sum from this.
    values, dtype = values.astype(accumulator(values)), values.dtype
    return lax.broadcast_in_dim(values, (n, *image, channels), (0, 3)).astype(dtype)


def _xla_total(x):
    return jnp.sum(x, axis=(1, 2), dtype=accumulator(x)).astype(x.dtype)


def _compiled(name, *arrays):
    """The sums by a kernel, or None where there is none."""
    x = arrays[0]
    if x.dtype != jnp.float32 or kernels.name() == "jax":
        return None
    return kernels.handler(name, jax.ShapeDtypeStruct((x.shape[0], x.shape[3]), x.dtype))(*arrays)


def _cpu_total(x):
    if (found := _compiled("image_total", x)) is not None:
        return found
    ones = jnp.ones(x.shape[:3], x.dtype)
    image = (((1, 2), (1, 2)), ((0,), (0,)))
    return lax.dot_general(ones, x, image, preferred_element_type=accumulator(x)).astype(x.dtype)


def _cpu_inner(a, b):
    found = _compiled("image_inner", a, b)
    return _cpu_total(a * b) if found is None else found


_spread_p: Operation = primitive("spread", _spread, [lambda ct, values, image: total(ct)])
_total_p: Operation = primitive(
    "total", _xla_total, [lambda ct, x: spread(ct, x.aval.shape[1:3])], cpu=_cpu_total
)
_inner_p: Operation = primitive(
    "inner",
    lambda a, b: _xla_total(a * b),
    [
        lambda ct, a, b: spread(ct, b.shape[1:3]) * b,
        lambda ct, a, b: spread(ct, a.shape[1:3]) * a,
    ],
    cpu=_cpu_inner,
)
