"""Terms that a method adds to the task's loss on a client.

A term sees the network's outputs on a batch, the batch, and a context: whatever the message
brought, made of the batch once and not differentiated (a teacher's outputs, say). Both passes of
SAM see the same terms and contexts.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat.data import Batch
from fedjax_flat.models import Outputs, Variables
from fedjax_flat.tasks import Task, count, masked_sum


class Term(NamedTuple):
    """`loss(outputs, batch, context)`, a number, with `context(batch)`."""

    loss: Callable[[Outputs, Batch, Any], jax.Array]
    context: Callable[[Batch], Any] = lambda batch: ()


def outputs_of(task: Task, model: Variables) -> Callable[[Batch], Outputs]:
    """The context of a teacher: what another model says of the batch, in evaluation mode."""
    return lambda batch: task.forward(model, batch, None)


def batch_mean(values: jax.Array, batch: Batch) -> jax.Array:
    """The mean over the batch's real examples."""
    return masked_sum(values, batch.mask) / jnp.maximum(count(batch.mask), 1)
