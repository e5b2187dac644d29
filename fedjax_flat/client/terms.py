"""Terms that a method adds to the task's loss on a client.

A term sees the network's outputs on a batch, the batch, and a context: whatever the message
brought, made of the batch once and not differentiated (a teacher's outputs, say). Both passes of
SAM see the same terms and contexts.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat import errors
from fedjax_flat.data import Batch
from fedjax_flat.models import CLASSIFIER, Outputs, Variables
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


def divergence(target: jax.Array, logits: jax.Array) -> jax.Array:
    """KL(softmax(target) || softmax(logits)) over the last axis."""
    log_p, log_q = (jax.nn.log_softmax(z, axis=-1) for z in (target, logits))
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def features_of(name: str, outputs: Outputs) -> jax.Array:
    """What the classifier read, a row for each example."""
    if isinstance(outputs.features, tuple):
        raise errors.UsageError(
            f"{name} with a network that has no module {CLASSIFIER!r}: expected that name for its "
            "last one; what it reads are the features."
        )
    return outputs.features.reshape(outputs.features.shape[0], -1).astype(jnp.float32)


def check_classes(name: str, outputs: Outputs, batch: Batch, *, mixed: bool = False) -> None:
    """Refuses what is no classification; with mixed labels, unless `mixed` is fine."""
    shape, labels = jnp.shape(outputs.logits), jnp.shape(batch.labels)
    if len(shape) != 2 or shape[1] < 2 or labels not in (shape[:1], shape):
        raise errors.UsageError(
            f"{name} with labels of shape {labels} and outputs of shape {shape}: expected "
            "(batch,) and (batch, classes), that is task.name = 'classification'."
        )
    if labels == shape and not mixed:
        raise errors.UsageError(
            f"{name} with labels of shape {labels}: expected one class per example, so no mixup."
        )
