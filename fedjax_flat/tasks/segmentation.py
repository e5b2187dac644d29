"""One class per pixel: cross-entropy of the hardest pixels, and mean intersection over union.

Labels are (batch, height, width); pixels of the `ignored` class count nowhere.

    IoU_c = true positives / (true positives + false positives + false negatives)
    mIoU  = mean of IoU_c over the classes, `set`: from one confusion matrix of all images;
            `image`: from each image's own, then the mean over images

FedDrive (Fantauzzo et al., IROS 2022; Fani's thesis, eq. 5.8 to 5.10) prints the mean of images'
means over all classes, 0/0 for one that an image lacks; its program has one matrix of the whole set
and a mean over the classes that the truth has, which is what its tables are of and our default. As
printed is `variant` = image with `classes` = all, which takes 0/0 for 0; `union` has the classes in
truth or prediction. `iou.NAME` of a class that is left out is 0, too.

The loss is that of FedDrive: cross-entropy, of which the highest-loss share `hard` (there 25 %) of
the pixels count,

    loss = mean of the largest floor(hard n) of n losses (one at least),  hard = 1: all

n being the real pixels of an image or, with `hard_of` = batch, of the batch: the text does not say
of which. `hard_of` = released: n are all of an image's pixels, of which ignored ones have a loss of
0, as its program counts. Auxiliary heads (BiSeNetV2) add the same loss of their own logits, times
`auxiliary`, while training. Mining is part of the loss wherever one is reported; heads are not.
"""

import jax
import jax.numpy as jnp
import optax

from fedjax_flat import errors
from fedjax_flat.data import Dataset, Preprocess
from fedjax_flat.models import Model
from fedjax_flat.ops.select import largest
from fedjax_flat.settings import Setting
from fedjax_flat.tasks.base import Task, of_network

CLASSES = ("truth", "union", "all")
SETTINGS = {
    "ignored": Setting(255, "the label of pixels that count nowhere"),
    "hard": Setting(1.0, "share of the pixels, those of highest loss, that count", above=0,
                    at_most=1),
    "hard_of": Setting("image", "whose pixels; released: ignored ones among them",
                       choices=("image", "batch", "released")),
    "auxiliary": Setting(1.0, "weight of each auxiliary head's loss", at_least=0),
    "variant": Setting("set", "mIoU over the whole set, or the mean of each image's",
                       choices=("set", "image")),
    "classes": Setting("truth", "that mIoU is a mean over: in truth, or also in prediction, or all",
                       choices=CLASSES),
}


def segmentation(
    model: Model,
    preprocess: Preprocess,
    dataset: Dataset,
    *,
    ignored: int = 255,
    hard: float = 1.0,
    hard_of: str = "image",
    auxiliary: float = 1.0,
    variant: str = "set",
    classes: str = "truth",
) -> Task:
    """Cross-entropy per pixel that is not `ignored`; mIoU and pixel accuracy."""
    if preprocess.mixes_labels or (preprocess.moves_pixels and not preprocess.moves_labels):
        raise errors.UsageError(
            "segmentation with crop, rotation, flip or mixup of images alone: labels would not "
            "follow. Leave data.crop_padding, resized_crop, rotation and mixup at 0; data.scale, "
            "crop and flip move both where the data set's task is segmentation."
        )
    count = dataset.num_classes
    names = dataset.classes or tuple(map(str, range(count)))

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
        heads = (outputs.logits, *(outputs.auxiliary if auxiliary else ()))
        found = []
        for logits in heads:
            each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            counted = mask if hard == 1 else hardest(each, mask, hard, hard_of, batch.mask)
            found.append((jnp.where(mask, each, 0.0), counted))
        # The mean over the units of all heads has to be the sum of the heads' means.
        weights = [float(len(heads)) * (auxiliary if i else 1.0) for i in range(len(heads))]
        scaled = jnp.stack([w * each for w, (each, _) in zip(weights, found, strict=True)])
        return scaled, jnp.stack([counted for _, counted in found])

    def sums(outputs, batch):
        mask = real(batch)
        guess = jnp.argmax(outputs.logits, axis=-1)
        each = _confusions(batch.labels, guess, mask, count, apart=variant == "image")
        found = {"confusion": jnp.sum(each, axis=0)}
        if variant == "image":
            present = batch.mask & ((jnp.sum(each, axis=(1, 2)) > 0) | (classes == "all"))
            means = jax.vmap(lambda matrix: mean_iou(matrix, classes))(each)
            found["image_miou"] = jnp.sum(jnp.where(present, means, 0.0))
            found["images"] = jnp.sum(present.astype(jnp.float32))
        return found

    def report(sums):
        confusion = sums["confusion"]
        iou, _ = ious(confusion, classes)
        if variant == "image":
            miou = sums["image_miou"] / jnp.maximum(sums["images"], 1)
        else:
            miou = mean_iou(confusion, classes)
        hit = jnp.sum(jnp.diagonal(confusion))
        return {
            "miou": miou,
            "accuracy": hit / jnp.maximum(jnp.sum(confusion), 1),
            **{f"iou.{name}": iou[c] for c, name in enumerate(names)},
        }

    return of_network(model, preprocess, losses=losses, sums=sums, report=report, score="miou")


def hardest(
    losses: jax.Array, mask: jax.Array, share: float, of: str, real: jax.Array
) -> jax.Array:
    """Which pixels count: exactly as many as the module's docstring says, of equal ones the first.

    `mask` has the real pixels, `real` the real images of the batch.
    """
    rows = (1, -1) if of == "batch" else (losses.shape[0], -1)
    values, there = losses.reshape(rows), mask.reshape(rows)
    if of == "released":
        values = jnp.where(there, values, 0.0)
        there = jnp.broadcast_to(real[:, None], there.shape)

    def of_row(values, there):
        n = jnp.sum(there, dtype=jnp.int32)
        k = jnp.maximum(jnp.floor(share * n.astype(jnp.float32)).astype(jnp.int32), 1)
        found = largest(jnp.where(there, values, -jnp.inf), jnp.minimum(k, n))
        return found & there

    chosen = jax.vmap(of_row)(jax.lax.stop_gradient(values), there)
    return chosen.reshape(losses.shape)


def _confusions(labels, guess, mask, classes: int, *, apart: bool) -> jax.Array:
    """(images, truth, prediction), or (1, ...) of all; counted in whole numbers."""
    images = labels.shape[0] if apart else 1
    truth = jnp.where(mask, labels, 0).astype(jnp.int32)
    cell = truth * classes + guess.astype(jnp.int32)
    if apart:
        first = jnp.arange(images, dtype=jnp.int32) * classes**2
        cell = cell + first.reshape(-1, *(1,) * (labels.ndim - 1))
    counts = jnp.zeros(images * classes**2, jnp.int32)
    counts = counts.at[cell.reshape(-1)].add(mask.reshape(-1).astype(jnp.int32))
    return counts.reshape(images, classes, classes).astype(jnp.float32)


def ious(confusion: jax.Array, classes: str = "truth") -> tuple[jax.Array, jax.Array]:
    """(IoU of every class, whether it counts in the mean) of a matrix (truth, prediction)."""
    hit, truth = jnp.diagonal(confusion), jnp.sum(confusion, axis=1)
    union = jnp.sum(confusion, axis=0) + truth - hit
    counts = {"truth": truth > 0, "union": union > 0, "all": union >= 0}[classes]
    return jnp.where(counts, hit / jnp.maximum(union, 1), 0.0), counts


def mean_iou(confusion: jax.Array, classes: str = "truth") -> jax.Array:
    """The mean of IoU over the classes that count; 0 if there is none."""
    iou, counts = ious(confusion, classes)
    return jnp.sum(iou) / jnp.maximum(jnp.sum(counts.astype(jnp.float32)), 1)
