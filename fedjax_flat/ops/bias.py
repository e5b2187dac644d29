"""A bias whose gradient, a sum over examples and image, is cheap on CPU (sums.py)."""

import jax
import jax.numpy as jnp

from fedjax_flat.ops.sums import spread


def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """x (N, H, W, C) plus bias (C,)."""
    n, *image, channels = x.shape
    return x + spread(jnp.broadcast_to(bias.reshape(1, channels), (n, channels)), image)
