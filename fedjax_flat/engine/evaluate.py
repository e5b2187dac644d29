"""Loss and accuracy of a model on a whole split, in one compiled loop over masked batches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_flat.data import Batch, Examples
from fedjax_flat.objective import Objective, Totals


def evaluator(objective: Objective, batch_size: int) -> Callable[[Any, Examples], Totals]:
    """`evaluate(params, examples) -> Totals`; jit it, and pass the examples as an argument."""

    def evaluate(params, examples: Examples) -> Totals:
        examples = jax.tree.map(jnp.asarray, examples)
        count = examples.labels.shape[0]
        batch = min(batch_size, count)

        def body(i, totals):
            index = i * batch + jnp.arange(batch)
            here = jnp.minimum(index, count - 1)
            stored = Batch(examples.images[here], examples.labels[here], index < count)
            return totals + objective.totals(params, objective.normalise(stored))

        return jax.lax.fori_loop(0, -(-count // batch), body, Totals.zero())

    return evaluate
