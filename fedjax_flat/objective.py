"""What is minimised: cross-entropy as sums and counts, divided once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_flat import errors
from fedjax_flat.data import Batch, Preprocess
from fedjax_flat.models import Model


class Totals(NamedTuple):
    """Sums over examples; add them, divide at the end."""

    loss: jax.Array
    correct: jax.Array
    examples: jax.Array

    @classmethod
    def zero(cls) -> "Totals":
        """The totals of no example."""
        return cls(*(jnp.zeros((), jnp.float32) for _ in cls._fields))

    def __add__(self, other):
        return Totals(*(a + b for a, b in zip(self, other, strict=True)))

    def means(self) -> tuple[jax.Array, jax.Array]:
        """(loss, accuracy) per example; zero when there was none."""
        n = jnp.maximum(self.examples, 1)
        return self.loss / n, self.correct / n


class Objective(NamedTuple):
    """The loss in three pure parts.

    `augment(batch, key)` and `normalise(batch)` turn stored examples into network inputs, for
    training and for evaluation. `totals(params, batch, key)` is the loss there; methods that need
    two gradients of one batch augment once and call it twice with the same key.
    """

    augment: Callable[[Batch, jax.Array], Batch]
    normalise: Callable[[Batch], Batch]
    totals: Callable[..., Totals]

    def mean_loss(self, params: Any, batch: Batch, key: jax.Array | None = None):
        """(mean loss over the real examples, totals)."""
        totals = self.totals(params, batch, key)
        return totals.means()[0], totals


Loss = Callable[[jax.Array, jax.Array], jax.Array]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Softmax cross-entropy of each example; labels are classes or distributions over them."""
    if labels.ndim < logits.ndim:
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return optax.softmax_cross_entropy(logits, labels)


def classification(
    model: Model, preprocess: Preprocess, loss: Loss = cross_entropy
) -> Objective:
    """`loss(logits, labels)` per example, and accuracy (of a mixed label, on its largest part)."""
    if preprocess.mixes_labels:
        _check_takes_distributions(loss)

    def totals(params, batch, key=None):
        logits = model.apply(params, batch.images, key)
        losses = loss(logits, batch.labels)
        labels = batch.labels if batch.labels.ndim == 1 else jnp.argmax(batch.labels, axis=-1)
        correct = jnp.argmax(logits, axis=-1).astype(labels.dtype) == labels
        # where, not a product: a padded row must not leak a NaN.
        return Totals(
            loss=jnp.sum(jnp.where(batch.mask, losses, 0.0)),
            correct=jnp.sum((batch.mask & correct).astype(jnp.float32)),
            examples=jnp.sum(batch.mask.astype(jnp.float32)),
        )

    return Objective(preprocess.train, preprocess.evaluate, totals)


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
            "objective.cross_entropy, or no mixup."
        )
