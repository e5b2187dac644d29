"""Which pairs of images are of one place, and which of them a loss is made of.

Labels are identities, whole numbers (N,): pairs of one number are positive, all others negative. Or
they are positions in metres, (N, 2): pairs within `radius` are positive, pairs beyond
`negative_radius` negative, and those between are neither.

Triplets of anchor i (Dutto et al., "Collaborative visual place recognition through federated
learning", CVPRW 2024; NetVLAD, Arandjelovic et al., CVPR 2016), of L2-normalised embeddings f, are

    p(i)   = the positive with the largest f_i . f_p         (`hardest`: the smallest)
    n_j(i) = the k negatives with the largest f_i . f_n

The closest positive is the most alike of those within the radius, where cameras look to all sides.
Of equal values the first image counts.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.spatial import cKDTree

POSITIVES = ("closest", "hardest")


class Sought(NamedTuple):
    """Labels of a test set that is searched: which examples are asked for, and which searched."""

    labels: Any
    query: Any
    database: Any


class Relation(NamedTuple):
    """When two images are of one place; identities need no radius."""

    radius: float
    negative_radius: float

    def between(self, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(positive, negative): of every label of `a` with every label of `b`, (A, B)."""
        if a.ndim == 1:
            same = a[:, None] == b[None]
            return same, ~same
        apart = jnp.sum(jnp.square(a[:, None] - b[None]), axis=-1)
        return apart <= self.radius**2, apart > self.negative_radius**2


    def right(self, asked: jax.Array, found: jax.Array) -> jax.Array:
        """Of the labels (Q,) asked for and those found (Q, k), which are of the same place."""
        return jax.vmap(lambda a, b: self.between(a[None], b)[0][0])(asked, found)

    def paired(self, labels: np.ndarray, others: np.ndarray | None = None) -> np.ndarray:
        """Which labels have a positive among `others`, or among themselves; on the host."""
        if labels.ndim == 1:
            if others is not None:
                return np.isin(labels, others)
            _, number, count = np.unique(labels, return_inverse=True, return_counts=True)
            return count[number.reshape(-1)] > 1
        if len(labels if others is None else others) < (2 if others is None else 1):
            return np.zeros(len(labels), bool)
        tree = cKDTree(np.asarray(labels if others is None else others, float))
        near = tree.query(np.asarray(labels, float), k=[2 if others is None else 1])[0][:, 0]
        return near <= self.radius


class Triplets(NamedTuple):
    """For each anchor its positive, (A,), and negatives, (A, k), with whether they are there."""

    positive: jax.Array
    has_positive: jax.Array
    negative: jax.Array
    has_negative: jax.Array


def plain(labels: Any) -> jax.Array:
    """The labels alone, also of a set that is searched."""
    return labels.labels if isinstance(labels, Sought) else labels


def triplets(
    similarity: jax.Array, positive: jax.Array, negative: jax.Array, *, negatives: int,
    choose: str = "closest",
) -> Triplets:
    """Of each row's anchor; `positive` and `negative` say which columns may be chosen."""
    similarity = jax.lax.stop_gradient(similarity)
    sign = 1.0 if choose == "closest" else -1.0
    near = jnp.argmax(jnp.where(positive, sign * similarity, -jnp.inf), axis=1)
    values, hard = jax.lax.top_k(
        jnp.where(negative, similarity, -jnp.inf), min(negatives, similarity.shape[1])
    )
    return Triplets(near, jnp.any(positive, axis=1), hard, values > -jnp.inf)


def within(relation: Relation, labels: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(positive, negative) pairs among the real images of a batch; an image is no pair."""
    positive, negative = relation.between(labels, labels)
    real = mask[:, None] & mask[None]
    other = ~jnp.eye(mask.shape[0], dtype=bool)
    return positive & real & other, negative & real


def similarities(a: jax.Array, b: jax.Array) -> jax.Array:
    """f_i . f_j of embeddings, (A, B)."""
    return jnp.matmul(a, b.T)
