"""Sizes that no memory holds, and batches that have no variance, refused before they are tried.

What is counted is the least that is needed, a model with its gradient and the inputs of a batch:
who comes near it will run out of memory later, with a sentence of its own.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_flat import errors, memory, parts
from fedjax_flat.data import Batch, Dataset, Partition
from fedjax_flat.data.federated import narrow
from fedjax_flat.experiment import usage
from fedjax_flat.models import Model
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


def check_batches(config: Config, model: Model, partition: Partition) -> None:
    """Refuses a training batch of one example where BatchNorm would normalise by it.

    What it makes of one example is its shift, whatever the example, where images are gone or a
    mean over them is normalised.
    """
    variables = jax.eval_shape(model.init, jax.random.key(0))
    moving = config.model.statistics != "frozen" and config.client.frozen != "features"
    normed = parts.take(variables, lambda name: name.startswith("stats/batch_stats/"))
    if not normed or not moving or not usage.takes_steps(config):
        return
    size, owns = config.client.batch_size, partition.sizes
    alone = (owns == 1) | ((size == 1) & (owns > 0))
    if not config.client.drop_last:
        alone |= owns % size == 1
    if not alone.any():
        return
    client = int(np.argmax(alone))
    raise errors.UsageError(
        f"client {client} has {int(owns[client])} examples, and client.batch_size = {size} leaves "
        f"a batch of one, of which BatchNorm has no variance to normalise by ({int(alone.sum())} "
        "such clients). Choose another size or client.drop_last = True, leave out clients of one "
        "example, or choose model.norm = group or model.statistics = frozen."
    )
