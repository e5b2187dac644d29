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


def mean_of(each: Any, weights: jax.Array) -> Any:
    """The weighted mean of uploads that were kept apart, stacked over the cohort."""
    total = jax.tree.map(lambda u: jnp.tensordot(weights.astype(u.dtype), u, axes=1), each)
    return mean(total, jnp.sum(weights))
