"""From uploads to one pseudo-gradient."""

from typing import Any

import jax
import jax.numpy as jnp


def weighted(upload: Any, weight: jax.Array) -> Any:
    """weight * upload; these are summed over the cohort."""
    return jax.tree.map(lambda u: weight.astype(u.dtype) * u, upload)


def mean(weighted_sum: Any, total_weight: jax.Array) -> Any:
    """The weighted mean, and zero when nobody took part."""
    divisor = jnp.where(total_weight > 0, total_weight, 1)
    return jax.tree.map(lambda s: s / divisor.astype(s.dtype), weighted_sum)
