"""Images of the same place close together: an embedding for search, learned from pairs.

The network's outputs, divided by their L2 norm, are the embedding f. Of a batch the loss is made of
its own images (pairs.py says of which); units are triplets, pairs or anchors:

    triplet            max(0, |f_i - f_p| - |f_i - f_n| + margin)         k hardest n per anchor i
    contrastive        |f_i - f_j|^2 / 2 if of one place, else max(0, margin - |f_i - f_j|)^2 / 2
    multi_similarity   log(1 + sum_p exp(-a (s_ip - c))) / a + log(1 + sum_n exp(b (s_in - c))) / b

triplet: Schroff et al. (CVPR 2015), with distances as NetVLAD's successors and FedVPR (Dutto et
al., CVPRW 2024) have them, not squared; FedVPR's text leaves the margin open, 0.1 is that of the
benchmark it builds on. contrastive: Hadsell et al. (CVPR 2006), each pair once. multi_similarity:
Wang et al. (CVPR 2019), over the positives with s_ip < max_n s_in + epsilon and the negatives with
s_in > min_p s_ip - epsilon; every image is an anchor, and one with no such pair has a loss of 0.

Which images form a batch: as any client draws them, or, with `mine_every` = n, triplets that the
client finds among all of its images, by embeddings made anew every n steps (client/mining.py).

What is reported of single batches, while training or on clients' own examples, is recall among the
batch's images. Of an evaluated split it is recall of the search (search.py), and its loss is that
of its batches of eval.batch_size.
"""

import dataclasses
import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_flat import errors
from fedjax_flat.data import Dataset, Preprocess, count_of
from fedjax_flat.data.sources.places import check_places
from fedjax_flat.models import Model
from fedjax_flat.settings import Setting
from fedjax_flat.tasks import search
from fedjax_flat.tasks.base import Mining, Task, of_network
from fedjax_flat.tasks.pairs import (
    POSITIVES,
    Relation,
    Sought,
    plain,
    similarities,
    triplets,
    within,
)

logger = logging.getLogger("fedjax_flat")
LOSSES = ("triplet", "contrastive", "multi_similarity")
TINY = 1e-12
SETTINGS = {
    "dimensions": Setting(128, "of the embedding, by networks that are made for so many classes",
                          at_least=2),
    "loss": Setting("triplet", "of which pairs are made", choices=LOSSES),
    "margin": Setting(0.1, "of triplet and contrastive", at_least=0),
    "negatives": Setting(5, "k: the hardest of an anchor, each a triplet", at_least=1),
    "positive": Setting("closest", "of an anchor: the most alike, or the least",
                        choices=POSITIVES),
    "mine_every": Setting(
        0, "steps for which a client's embeddings, of which it mines batches, are kept; 0: batches "
        "are at random", at_least=0,
    ),
    "radius": Setting(25.0, "metres within which images are of one place", above=0),
    "negative_radius": Setting(
        0.0, "metres beyond which they are of two; 0: the radius", at_least=0
    ),
    "alpha": Setting(2.0, "a of multi_similarity", above=0),
    "beta": Setting(50.0, "b of multi_similarity", above=0),
    "base": Setting(0.5, "c of multi_similarity"),
    "epsilon": Setting(0.1, "of multi_similarity", at_least=0),
}


def retrieval(
    model: Model,
    preprocess: Preprocess,
    dataset: Dataset,
    *,
    dimensions: int = 128,
    loss: str = "triplet",
    margin: float = 0.1,
    negatives: int = 5,
    positive: str = "closest",
    mine_every: int = 0,
    radius: float = 25.0,
    negative_radius: float = 0.0,
    alpha: float = 2.0,
    beta: float = 50.0,
    base: float = 0.5,
    epsilon: float = 0.1,
) -> Task:
    """L2-normalised embeddings of images, compared with labels that are identities or positions.

    `dimensions` is for whoever builds the network.
    """
    del dimensions
    given = {"loss": loss, "margin": margin, "negatives": negatives, "positive": positive,
             "mine_every": mine_every, "alpha": alpha, "beta": beta, "epsilon": epsilon}
    for name, value in given.items():
        SETTINGS[name].check(f"task.{name}", value)
    if preprocess.mixes_labels:
        raise errors.UsageError(
            "retrieval with mixup: a mixed image is of no place. Leave data.mixup at 0."
        )
    relation = relation_of(radius, negative_radius)
    _warn_of_queries(dataset, relation)

    def forward(variables, batch, key, at_blocks=None):
        outputs = model.apply(variables, batch.inputs, key, batch.mask, at_blocks)
        if outputs.logits.ndim != 2 or outputs.logits.shape[1] < 2:
            raise errors.UsageError(
                f"retrieval by outputs of shape {outputs.logits.shape}: expected one embedding "
                "per image, (batch, dimensions), of two or more numbers."
            )
        return outputs._replace(logits=normalised(outputs.logits))

    def pairs(outputs, batch):
        f = outputs.logits
        return similarities(f, f), *within(relation, plain(batch.labels), batch.mask)

    def of_triplets(f, similarity, is_positive, is_negative):
        found = triplets(similarity, is_positive, is_negative, negatives=negatives,
                         choose=positive)
        near = distance(f, f[found.positive])
        far = distance(f[:, None], f[found.negative])
        there = found.has_positive[:, None] & found.has_negative
        return jnp.maximum(near[:, None] - far + margin, 0), there

    def of_pairs(f, similarity, is_positive, is_negative):
        once = jnp.triu(jnp.ones(similarity.shape, bool), 1)
        square = jnp.maximum(2 - 2 * similarity, 0)
        far = jnp.square(jnp.maximum(margin - _root(square), 0))
        return jnp.where(is_positive, square, far) / 2, (is_positive | is_negative) & once

    of_anchors: Any = functools.partial(
        multi_similarity, alpha=alpha, beta=beta, base=base, epsilon=epsilon
    )
    how: Any = {
        "triplet": of_triplets, "contrastive": of_pairs, "multi_similarity": of_anchors,
    }[loss]

    def losses(outputs, batch):
        values, mask = how(outputs.logits, *pairs(outputs, batch))
        if loss == "multi_similarity":
            mask = batch.mask
        return jnp.where(mask, values, jnp.zeros((), values.dtype)), mask

    def sums(outputs, batch):
        similarity, is_positive, _ = pairs(outputs, batch)
        count = batch.mask.shape[0]
        others = batch.mask[None] & ~jnp.eye(count, dtype=bool)
        _, near = jax.lax.top_k(
            jnp.where(others, jax.lax.stop_gradient(similarity), -jnp.inf),
            min(max(search.RANKS), count),
        )
        right = jnp.take_along_axis(is_positive, near, axis=1)
        queries = jnp.sum(jnp.any(is_positive, axis=1).astype(jnp.float32))
        return {"queries": queries, "hits": search.hits(right)}

    def report(sums):
        share = sums["hits"] / jnp.maximum(sums["queries"], 1)
        return {f"recall@{n}": share[i] for i, n in enumerate(search.RANKS)}

    task = of_network(
        model, preprocess, losses=losses, sums=sums, report=report, score="recall@1"
    )
    mining = Mining(mine_every, relation, negatives, positive) if mine_every else None
    return task._replace(
        forward=forward, mining=mining,
        search=lambda embeddings, labels: search.recall_sums(embeddings, labels, relation),
    )


def normalised(x: jax.Array) -> jax.Array:
    """Rows of length 1; zeros stay zeros."""
    length = jnp.sqrt(jnp.maximum(jnp.sum(jnp.square(x), axis=-1, keepdims=True), TINY))
    return x / length


def distance(a: jax.Array, b: jax.Array) -> jax.Array:
    """|a - b| over the last axis; its gradient is 0 where they are the same."""
    return _root(jnp.sum(jnp.square(a - b), axis=-1))


def _root(square: jax.Array) -> jax.Array:
    there = square > TINY
    return jnp.where(there, jnp.sqrt(jnp.where(there, square, 1.0)), 0.0)


def multi_similarity(
    f: jax.Array, similarity: jax.Array, positive: jax.Array, negative: jax.Array, *,
    alpha: float, beta: float, base: float, epsilon: float,
) -> tuple[jax.Array, jax.Array]:
    """The loss of every anchor, 0 where it has no pair that counts; and which has one."""
    del f
    fixed = jax.lax.stop_gradient(similarity)
    nearest = jnp.max(jnp.where(negative, fixed, -jnp.inf), axis=1, keepdims=True)
    farthest = jnp.min(jnp.where(positive, fixed, jnp.inf), axis=1, keepdims=True)
    near = positive & (fixed < nearest + epsilon)
    far = negative & (fixed > farthest - epsilon)

    def soft(x, mask, scale):
        # log(1 + sum exp): the 1 is one more term.
        terms = jnp.pad(jnp.where(mask, x, -jnp.inf), ((0, 0), (1, 0)))
        return jax.nn.logsumexp(terms, axis=1) / scale

    loss = soft(-alpha * (similarity - base), near, alpha)
    loss = loss + soft(beta * (similarity - base), far, beta)
    return loss, jnp.any(near, axis=1) | jnp.any(far, axis=1)


def relation_of(radius: float, negative_radius: float) -> Relation:
    """Pairs by these radii, which have to make sense."""
    for name, value in (("radius", radius), ("negative_radius", negative_radius)):
        SETTINGS[name].check(f"task.{name}", value)
    if negative_radius and negative_radius < radius:
        raise errors.UsageError(
            f"task.negative_radius = {negative_radius} is below task.radius = {radius}, so that "
            "images would be of one place and of two: expected at least the radius, or 0 for it."
        )
    return Relation(radius, negative_radius or radius)


def searched(dataset: Dataset) -> Dataset:
    """The same with test labels that say which images are asked for, and which are searched."""
    check_places(dataset)
    masks = {name: np.zeros(count_of(dataset.test), bool) for name in ("queries", "database")}
    for name, mask in masks.items():
        mask[np.asarray(dataset.parts[name])] = True
    labels = Sought(dataset.test.labels, masks["queries"], masks["database"])
    return dataclasses.replace(dataset, test=dataset.test._replace(labels=labels))


def _warn_of_queries(dataset: Dataset, relation: Relation) -> None:
    labels = dataset.test.labels
    if not isinstance(labels, Sought):
        return
    values = np.asarray(labels.labels)
    lost = ~relation.paired(values[labels.query], values[labels.database])
    if lost.any():
        logger.warning(
            "%s: %d of %d queries show what no image of the database does; they count as wrong",
            dataset.name, lost.sum(), len(lost),
        )
