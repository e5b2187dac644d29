"""One class per pixel: cross-entropy, confusion matrix and mean intersection over union.

Labels are (batch, height, width); pixels of the `ignored` class count nowhere.

    IoU_c = true positives / (true positives + false positives + false negatives)
    mIoU  = mean of IoU_c over the classes that occur, in truth or prediction, in the whole set
"""

import jax.numpy as jnp
import optax

from fedjax_flat import errors
from fedjax_flat.data import Dataset, Preprocess
from fedjax_flat.models import Model
from fedjax_flat.tasks.base import Task, of_network


def segmentation(
    model: Model, preprocess: Preprocess, dataset: Dataset, *, ignored: int = 255
) -> Task:
    """Cross-entropy per pixel that is not `ignored`; mIoU and pixel accuracy."""
    if preprocess.mixes_labels or preprocess.moves_pixels:
        raise errors.UsageError(
            "segmentation with crop, rotation, flip or mixup of images alone: labels would not "
            "follow. Leave data.crop_padding, resized_crop, rotation, flip and mixup at 0."
        )
    classes = dataset.num_classes

    def real(batch):
        shape = (-1, *(1,) * (batch.labels.ndim - 1))
        return (batch.labels != ignored) & batch.mask.reshape(shape)

    def losses(outputs, batch):
        if batch.labels.shape != outputs.logits.shape[:-1]:
            raise errors.UsageError(
                f"segmentation of labels of shape {batch.labels.shape} by logits of shape "
                f"{outputs.logits.shape}: expected a class per pixel and logits for each."
            )
        mask = real(batch)
        labels = jnp.where(mask, batch.labels, 0).astype(jnp.int32)
        return optax.softmax_cross_entropy_with_integer_labels(outputs.logits, labels), mask

    def sums(outputs, batch):
        mask = real(batch)
        truth = jnp.where(mask, batch.labels, 0).astype(jnp.int32)
        guess = jnp.argmax(outputs.logits, axis=-1).astype(jnp.int32)
        cell = (truth * classes + guess).reshape(-1)
        counts = jnp.zeros(classes * classes, jnp.float32).at[cell].add(
            mask.reshape(-1).astype(jnp.float32)
        )
        return {"confusion": counts.reshape(classes, classes)}

    def report(sums):
        confusion = sums["confusion"]
        hit = jnp.diagonal(confusion)
        union = jnp.sum(confusion, axis=0) + jnp.sum(confusion, axis=1) - hit
        occurs = (union > 0).astype(jnp.float32)
        iou = hit / jnp.maximum(union, 1)
        return {
            "miou": jnp.sum(iou) / jnp.maximum(jnp.sum(occurs), 1),
            "accuracy": jnp.sum(hit) / jnp.maximum(jnp.sum(confusion), 1),
        }

    return of_network(model, preprocess, losses=losses, sums=sums, report=report, score="miou")
