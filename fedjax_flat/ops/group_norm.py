"""Group normalisation as x A + B, where A and B, one number per example and channel, are small.

    mean_g = sum of x over group g / n_g,    var_g = sum of x^2 / n_g - mean_g^2
    A = scale / sqrt(var + epsilon),    B = bias - mean A

What touches the image are two sums per example and channel, total(x) and inner(x, x) of sums.py,
and one multiplication with an addition, in derivatives of any order too; XLA:CPU would otherwise
compute the summands anew for every group. Wu and He, "Group normalization" (ECCV
2018).
"""

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_flat import errors
from fedjax_flat.ops.primitive import accumulator
from fedjax_flat.ops.sums import inner, spread, total


def group_norm(
    x: jax.Array, scale: jax.Array, bias: jax.Array, groups: int, epsilon: float = 1e-5
) -> jax.Array:
    """x (N, H, W, C) normalised over image and channels of each of `groups` groups."""
    n, h, w, c = x.shape
    if c % groups:
        raise errors.UsageError(f"group_norm: {groups} groups do not divide {c} channels.")
    values = x.astype(accumulator(x))
    size = h * w * c // groups
    per_group = lambda s: jnp.sum(s.reshape(n, groups, c // groups), axis=2) / size
    mean = per_group(total(values))
    variance = jnp.maximum(per_group(inner(values, values)) - jnp.square(mean), 0)
    channels = lambda v: jnp.repeat(v, c // groups, axis=1)
    a = channels(lax.rsqrt(variance + epsilon)) * scale.astype(values.dtype).reshape(1, c)
    b = bias.astype(values.dtype).reshape(1, c) - channels(mean) * a
    return (values * spread(a, (h, w)) + spread(b, (h, w))).astype(x.dtype)
