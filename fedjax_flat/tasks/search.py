"""Exact search: of each query the nearest of a database, and how often one of them is right.

    recall@n = share of the queries of which one of the n nearest is of the same place

Where a set has a database and queries, all queries count, as published evaluations do: one whose
place is not in the database is never right. Of any other set every image is asked for among all
others, and those count that have another of their place.

Similarities are products of matrices, a block of queries with a block of the database at a time, in
one compiled program; of equal ones the earlier image is the nearer.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_flat.tasks.pairs import Relation, Sought

RANKS = (1, 5, 10)
QUERIES, ROWS = 1000, 8192  # of a block


def nearest(
    queries: jax.Array, database: jax.Array, count: int, own: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """(positions in the database, similarities) of the `count` nearest of each query, best first.

    `own` says where in the database each query itself is, which is not found. There are at most as
    many as the database has, and a place without an image is -1.
    """
    count = min(count, database.shape[0])
    rows = min(ROWS, database.shape[0])
    own = np.full(queries.shape[0], -1, np.int32) if own is None else np.asarray(own, np.int32)
    found: list[tuple[np.ndarray, np.ndarray]] = []
    size = min(QUERIES, queries.shape[0])
    padded = jnp.pad(database, ((0, -database.shape[0] % rows), (0, 0)))
    blocks = padded.reshape(-1, rows, database.shape[1])
    last = jnp.int32(database.shape[0])
    for start in range(0, queries.shape[0], size):
        block, skip = queries[start : start + size], own[start : start + size]
        short = size - block.shape[0]
        block = jnp.pad(block, ((0, short), (0, 0)))
        skip = np.pad(skip, (0, short), constant_values=-1)
        place, score = _in_blocks(block, blocks, skip, last, count=count)
        found.append((np.asarray(place)[: size - short], np.asarray(score)[: size - short]))
    places, scores = (np.concatenate(x) for x in zip(*found, strict=True))
    return places, scores


@functools.partial(jax.jit, static_argnames="count")
def _in_blocks(queries, blocks, own, last, *, count):
    """The nearest of all blocks: after each, of those so far and its own."""
    rows = blocks.shape[1]
    keep = min(count, rows)

    def one(carry, block):
        first, places, scores = carry
        here = first + jnp.arange(rows, dtype=jnp.int32)
        score = jnp.matmul(queries, block.T)
        there = (here < last)[None] & (here[None] != own[:, None])
        value, place = jax.lax.top_k(jnp.where(there, score, -jnp.inf), keep)
        # Those so far come first: of equal values top_k takes the first.
        values = jnp.concatenate([scores, value], axis=1)
        all_places = jnp.concatenate([places, first + place], axis=1)
        value, which = jax.lax.top_k(values, count)
        return (first + rows, jnp.take_along_axis(all_places, which, axis=1), value), None

    shape = queries.shape[0], count
    start = jnp.int32(0), jnp.full(shape, -1, jnp.int32), jnp.full(shape, -jnp.inf, queries.dtype)
    (_, places, scores), _ = jax.lax.scan(one, start, blocks)
    return jnp.where(scores > -jnp.inf, places, -1), scores


def asked(labels: Any) -> tuple[np.ndarray, np.ndarray, bool]:
    """(queries, database, whether they are the same set) as positions in a labelled set."""
    if not isinstance(labels, Sought):
        everything = np.arange(len(labels))
        return everything, everything, True
    return np.flatnonzero(labels.query), np.flatnonzero(labels.database), False


def recall_sums(embeddings: jax.Array, labels: Any, relation: Relation) -> dict[str, Any]:
    """Sums of a whole set: queries, and how many were right within each of RANKS."""
    queries, database, same = asked(labels)
    plain = np.asarray(labels.labels if isinstance(labels, Sought) else labels)
    if same:
        queries = queries[relation.paired(plain)]
    if not len(queries):
        return {"queries": jnp.float32(0), "hits": jnp.zeros(len(RANKS), jnp.float32)}
    places, _ = nearest(
        embeddings[queries], embeddings[database], max(RANKS), queries if same else None
    )
    right = relation.right(plain[queries], plain[database][places]) & (places >= 0)
    return {"queries": jnp.float32(len(queries)), "hits": hits(right)}


def hits(right: jax.Array) -> jax.Array:
    """How many rows have one that is right among the first n, for n of RANKS."""
    return jnp.stack([
        jnp.sum(jnp.any(right[:, :n], axis=1).astype(jnp.float32)) for n in RANKS
    ])
