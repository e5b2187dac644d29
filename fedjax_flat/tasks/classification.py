"""One class per example: softmax cross-entropy and accuracy."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fedjax_flat import errors
from fedjax_flat.data import Dataset, Preprocess
from fedjax_flat.models import Model, Outputs
from fedjax_flat.tasks.base import Task, count, of_network

Loss = Callable[[jax.Array, jax.Array], jax.Array]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Softmax cross-entropy of each example; labels are classes or distributions over them."""
    if labels.ndim < logits.ndim:
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return optax.softmax_cross_entropy(logits, labels)


def classification(
    model: Model, preprocess: Preprocess, dataset: Dataset | None = None,
    *, temperature: float = 1.0, loss: Loss = cross_entropy,
) -> Task:
    """`loss(logits, labels)` per example, and accuracy (of a mixed label, on its largest part).

    Logits are the network's, divided by the temperature.
    """
    del dataset
    errors.positive("temperature", temperature)
    if preprocess.mixes_labels:
        _check_takes_distributions(loss)

    def losses(outputs, batch):
        logits, labels = outputs.logits, batch.labels
        if logits.ndim != 2 or labels.shape not in (logits.shape[:1], logits.shape):
            raise errors.UsageError(
                f"classification of labels of shape {labels.shape} by logits of shape "
                f"{logits.shape}: expected (batch,) and (batch, classes). A label per pixel is "
                "task.name = 'segmentation'."
            )
        return loss(logits, labels), batch.mask

    def sums(outputs, batch):
        labels = batch.labels if batch.labels.ndim == 1 else jnp.argmax(batch.labels, axis=-1)
        correct = jnp.argmax(outputs.logits, axis=-1).astype(labels.dtype) == labels
        return {"correct": count(batch.mask & correct)}

    report = lambda s: {"accuracy": s["correct"] / jnp.maximum(s["units"], 1)}
    task = of_network(
        model, preprocess, losses=losses, sums=sums, report=report, score="accuracy"
    )
    return task if temperature == 1 else task._replace(forward=_cooled(task.forward, temperature))


ABSENT = -1e9  # the logit of a class that is not there: its share is 0, and 0 times it is 0


def restricted(task: Task, classes: jax.Array) -> Task:
    """The same over some of the classes only, a mask: the others have no share and never win."""

    def seen(outputs):
        return outputs._replace(logits=among(outputs.logits, classes))

    return task._replace(
        losses=lambda outputs, batch: task.losses(seen(outputs), batch),
        sums=lambda outputs, batch: task.sums(seen(outputs), batch),
    )


def among(logits: jax.Array, classes: jax.Array) -> jax.Array:
    """The logits of some classes, ABSENT elsewhere."""
    if logits.ndim != 2 or classes.shape != logits.shape[1:]:
        raise errors.UsageError(
            f"{classes.shape[0]} classes, of which clients have some, and outputs of shape "
            f"{logits.shape}: expected (batch, classes), that is task.name = 'classification'."
        )
    return jnp.where(classes.reshape(1, -1), logits, jnp.asarray(ABSENT, logits.dtype))


def _cooled(forward: Callable[..., Outputs], temperature: float) -> Callable[..., Outputs]:
    def divided(variables, batch, key, at_blocks=None):
        outputs = forward(variables, batch, key, at_blocks)
        return outputs._replace(logits=outputs.logits / temperature)

    return divided


def _check_takes_distributions(loss: Loss) -> None:
    logits = labels = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    try:
        shape = jax.eval_shape(loss, logits, labels).shape
    except Exception as e:  # whatever a loss does with labels it was not written for
        shape = e
    if shape != (2,):
        raise errors.UsageError(
            f"mixup makes labels distributions over classes, float (batch, classes), but the loss "
            f"{getattr(loss, '__name__', loss)!r} takes classes only ({shape!s:.80}). Use "
            "tasks.cross_entropy, or no mixup."
        )
