"""Numbers to predict: squared error, its root and the share of variance explained."""

import jax.numpy as jnp

from fedjax_flat import errors
from fedjax_flat.data import Dataset, Preprocess
from fedjax_flat.models import Model
from fedjax_flat.tasks.base import Task, masked_sum, of_network


def regression(model: Model, preprocess: Preprocess, dataset: Dataset | None = None) -> Task:
    """(prediction - label)^2 per example; labels are (batch,), the network's outputs (batch, 1)."""
    del dataset

    def losses(outputs, batch):
        if outputs.logits.shape != (*batch.labels.shape, 1):
            raise errors.UsageError(
                f"regression of labels of shape {batch.labels.shape} by outputs of shape "
                f"{outputs.logits.shape}: expected (batch,) and (batch, 1)."
            )
        return jnp.square(outputs.logits[:, 0] - batch.labels.astype(jnp.float32)), batch.mask

    def sums(outputs, batch):
        del outputs
        labels = batch.labels.astype(jnp.float32)
        return {
            "labels": masked_sum(labels, batch.mask),
            "squared_labels": masked_sum(jnp.square(labels), batch.mask),
        }

    def report(sums):
        n = jnp.maximum(sums["units"], 1)
        variance = sums["squared_labels"] - jnp.square(sums["labels"]) / n
        unexplained = sums["loss"] / jnp.where(variance > 0, variance, 1)
        return {
            "r2": jnp.where(variance > 0, 1 - unexplained, 0.0),
            "rmse": jnp.sqrt(sums["loss"] / n),
        }

    return of_network(model, preprocess, losses=losses, sums=sums, report=report, score="r2")
