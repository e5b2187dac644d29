"""Rows times a matrix, however many axes the rows have.

The gradient of W in x W, for x (time, batch, features), is a sum over two axes, for which XLA:CPU
copies the cotangents into another order first: five times as long as the product itself.
"""

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_flat.ops.primitive import accumulator


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """x (..., K) and w (K, N) -> (..., N), as one product of two matrices."""
    rows = lax.collapse(x, 0, x.ndim - 1) if x.ndim > 2 else x
    out = jnp.matmul(rows, w, preferred_element_type=accumulator(x)).astype(x.dtype)
    return out.reshape(*x.shape[:-1], w.shape[1])
