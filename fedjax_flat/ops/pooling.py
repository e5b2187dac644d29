"""Pooling whose gradient is cheap on CPU.

The gradient of `lax.reduce_window` max pooling is a select-and-scatter, ten times slower than the
gradient of a maximum of strided views.
"""

import functools
import itertools

import jax
import jax.numpy as jnp


def max_pool(x: jax.Array, window: int = 2) -> jax.Array:
    """Maximum over disjoint window x window blocks; a ragged border is dropped, as in PyTorch."""
    rows, cols = x.shape[1] // window * window, x.shape[2] // window * window
    views = [
        x[:, i:rows:window, j:cols:window]
        for i, j in itertools.product(range(window), repeat=2)
    ]
    return functools.reduce(jnp.maximum, views)
