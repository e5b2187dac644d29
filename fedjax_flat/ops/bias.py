"""A bias whose gradient is cheap on CPU.

That gradient is a sum over examples and image for each channel. XLA:CPU fuses a sum with whatever
computes its summands, and then computes all of that anew for every channel: a fifth of a step for a
layer without pooling on 28 x 28 images. A product with a vector of ones is the same sum over
values computed once. Hence two primitives, each the transpose of the other, so that derivatives of
any order keep this form: `spread`, (N, C) -> (N, H, W, C), and `total`, back. On other platforms
they lower to XLA's own broadcast and sum.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_flat.ops.primitive import Operation, accumulator, primitive


def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """x (N, H, W, C) plus bias (C,)."""
    n, *image, channels = x.shape
    per_example = jnp.broadcast_to(bias.reshape(1, channels), (n, channels))
    return x + spread(per_example, image)


def spread(values: jax.Array, image: Sequence[int]) -> jax.Array:
    """(N, C) -> (N, H, W, C), the same over the image."""
    return _spread_p.bind(values, image=tuple(image))


def total(x: jax.Array) -> jax.Array:
    """(N, H, W, C) -> (N, C), the sum over the image."""
    return _total_p.bind(x)


def _spread(values, image):
    n, channels = values.shape
    # In the type of sums, because without primitives JAX makes the sum from this.
    values, dtype = values.astype(accumulator(values)), values.dtype
    return lax.broadcast_in_dim(values, (n, *image, channels), (0, 3)).astype(dtype)


def _xla_total(x):
    return jnp.sum(x, axis=(1, 2), dtype=accumulator(x)).astype(x.dtype)


def _cpu_total(x):
    ones = jnp.ones(x.shape[:3], x.dtype)
    image = (((1, 2), (1, 2)), ((0,), (0,)))
    return lax.dot_general(ones, x, image, preferred_element_type=accumulator(x)).astype(x.dtype)


_spread_p: Operation = primitive("spread", _spread, [lambda ct, values, image: _total_p.bind(ct)])
_total_p: Operation = primitive(
    "total", _xla_total, [lambda ct, x: _spread_p.bind(ct, image=x.aval.shape[1:3])], cpu=_cpu_total
)
