"""Group normalisation as x A + B, where A and B, one number per example and channel, are small.

    mean_g = sum of x over group g / n_g,    var_g = sum of x^2 / n_g - mean_g^2
    A = scale / sqrt(var + epsilon),    B = bias - mean A

What touches the image are two sums per example and channel, total(x) (bias.py) and
inner(x, y) = total(x y), and one multiplication with an addition. The transposes of both sums are
products with something spread over the image, so derivatives of any order keep this form; XLA:CPU
would otherwise compute the summands anew for every group. Wu and He, "Group normalization" (ECCV
2018).
"""

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_flat import errors
from fedjax_flat.ops.bias import spread, total
from fedjax_flat.ops.primitive import Operation, accumulator, primitive


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
    variance = jnp.maximum(per_group(_inner_p.bind(values, values)) - jnp.square(mean), 0)
    channels = lambda v: jnp.repeat(v, c // groups, axis=1)
    a = channels(lax.rsqrt(variance + epsilon)) * scale.astype(values.dtype).reshape(1, c)
    b = bias.astype(values.dtype).reshape(1, c) - channels(mean) * a
    return (values * spread(a, (h, w)) + spread(b, (h, w))).astype(x.dtype)


def _xla_inner(a, b):
    return jnp.sum(a * b, axis=(1, 2))


def _cpu_inner(a, b):
    ones = jnp.ones(a.shape[:3], a.dtype)
    return lax.dot_general(ones, a * b, (((1, 2), (1, 2)), ((0,), (0,))))


_inner_p: Operation = primitive(
    "inner",
    _xla_inner,
    [
        lambda ct, a, b: spread(ct, b.shape[1:3]) * b,
        lambda ct, a, b: spread(ct, a.shape[1:3]) * a,
    ],
    cpu=_cpu_inner,
)
