"""Mapping one function over the clients of a cohort, three ways that give the same numbers.

The function returns two trees: the first is summed over the cohort, the second is stacked. Only
the sum of the uploads is ever held, except under `vmap`.

| strategy  | work                                   | memory                       |
|-----------|----------------------------------------|------------------------------|
| `vmap`    | all clients at once                    | cohort x (model + batch)     |
| `map`     | one after the other                    | one client                   |
| `chunked` | `chunk` at once, chunks in sequence    | chunk x (model + batch)      |
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_flat import errors

Work = Callable[[Any], tuple[Any, Any]]
CohortMap = Callable[[Work, Any], tuple[Any, Any]]


def vmap_cohort(work: Work, members: Any) -> tuple[Any, Any]:
    """All clients at once."""
    summed, stacked = jax.vmap(work)(members)
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), summed), stacked


def map_cohort(work: Work, members: Any) -> tuple[Any, Any]:
    """One client after the other."""
    return _accumulate(work, members)


def chunked_cohort(chunk: int) -> CohortMap:
    """`chunk` clients at once; a last, smaller chunk when it does not divide the cohort."""
    if chunk < 1:
        raise errors.UsageError(f"cohort.chunk = {chunk}: expected at least 1.")

    def cohort_map(work, members):
        size = jax.tree.leaves(members)[0].shape[0]
        whole = size // chunk * chunk
        parts = []
        if whole:
            head = jax.tree.map(
                lambda x: x[:whole].reshape(whole // chunk, chunk, *x.shape[1:]), members
            )
            summed, stacked = _accumulate(lambda m: vmap_cohort(work, m), head)
            parts.append(
                (summed, jax.tree.map(lambda x: x.reshape(whole, *x.shape[2:]), stacked))
            )
        if size > whole:
            parts.append(vmap_cohort(work, jax.tree.map(lambda x: x[whole:], members)))
        if len(parts) == 1:
            return parts[0]
        (sum_a, stack_a), (sum_b, stack_b) = parts
        return (
            jax.tree.map(jnp.add, sum_a, sum_b),
            jax.tree.map(lambda a, b: jnp.concatenate([a, b]), stack_a, stack_b),
        )

    return cohort_map


def _accumulate(work: Work, members: Any) -> tuple[Any, Any]:
    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), members)
    zeros = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(lambda m: work(m)[0], first)
    )

    def body(carry, member):
        summed, stacked = work(member)
        return jax.tree.map(jnp.add, carry, summed), stacked

    return jax.lax.scan(body, zeros, members)


def cohort_map(strategy: str, chunk: int = 8) -> CohortMap:
    """The strategy called `vmap`, `map` or `chunked`."""
    make = errors.lookup(
        "cohort strategy",
        strategy,
        {
            "vmap": lambda: vmap_cohort,
            "map": lambda: map_cohort,
            "chunked": lambda: chunked_cohort(chunk),
        },
    )
    return make()
