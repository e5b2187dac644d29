"""Sizes that no memory holds, refused before they are tried.

What is counted is the least that is needed, a model with its gradient and the inputs of a batch:
who comes near it will run out of memory later, with a sentence of its own.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_flat import memory
from fedjax_flat.data import Batch, Dataset
from fedjax_flat.data.federated import narrow
from fedjax_flat.tasks import Task

Config = Any  # ml_collections.ConfigDict


def check(config: Config, task: Task, dataset: Dataset) -> None:
    """Refuses a model, or a batch, that needs more than a share of the free memory."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    model = memory.size_of(jax.eval_shape(task.init, key).params)
    memory.check(
        f"model {config.model.name} of {model / 1e6:.0f} MB, trained with its gradient and an "
        "anchor,", 3 * model, "Choose a smaller one.",
    )
    inputs, labels = jax.tree.map(lambda x: narrow(np.asarray(x[:1])), dataset.train)
    batch = Batch(inputs, labels, jnp.ones(1, bool))
    example = memory.size_of(jax.eval_shape(task.prepare, batch, key).inputs)
    at_once = {"vmap": config.cohort.size, "chunked": min(config.cohort.chunk, config.cohort.size)}
    memory.check(
        f"client.batch_size = {config.client.batch_size}: a batch of {example:,} bytes per example",
        config.client.batch_size * example * at_once.get(config.cohort.strategy, 1),
        "Choose a smaller one.",
    )
    if config.eval.clients:
        memory.check(
            f"eval.batch_size = {config.eval.batch_size}: a batch of {example:,} bytes per example",
            config.eval.batch_size * example, "Choose a smaller one.",
        )
