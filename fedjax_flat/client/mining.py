"""Batches that a client mines among its own images: anchors, their positives, hardest negatives.

FedVPR (Dutto et al., CVPRW 2024): database and hard negatives only inside the client's own images;
features are computed now and then, not in every step. Of B images of a batch A = B // (2 + k), one
at least, are anchors: in turn, in the epoch's order, the images that have a positive and a negative
on the client. Beside them are, by the embeddings of all the client's images in evaluation mode as
they were at the last step that is a multiple of `every`, their positives and their k hardest
negatives (tasks/pairs.py). An image that is chosen twice is there once; the rest is padding. Which
triplets the loss has of these images is the task's business, by their embeddings of this step.

Shapes depend on the largest client only, trip counts on the client itself. Where clients are mapped
by `vmap`, embeddings are made anew in every step, because both branches run: the result is the
same, the time is not.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat import errors
from fedjax_flat.data import ClientData
from fedjax_flat.data.federated import client_batch
from fedjax_flat.models import Variables
from fedjax_flat.tasks import Task
from fedjax_flat.tasks.pairs import plain, similarities, triplets

AT_ONCE = 256  # images whose relation to all others is looked at


class Miner(NamedTuple):
    """Of one client.

    `empty()` is a cache of embeddings, `refreshed(cache, variables, i)` what it is in step i. Of
    an epoch's positions `anchors(positions)` are those that can be anchors, first, and how many;
    `batch(cache, anchors, i)` are the positions of the images of the epoch's step i.
    """

    empty: Callable[[], Any]
    refreshed: Callable[[Any, Variables, Any], Any]
    anchors: Callable[[jax.Array], Any]
    batch: Callable[[Any, Any, Any], jax.Array]


def plain_batches(batch_size: int) -> Miner:
    """Nothing is mined: batches are the epoch's order, cut."""

    def batch(cache, positions, i):
        del cache
        return jax.lax.dynamic_slice(positions, (i * batch_size,), (batch_size,))

    return Miner(lambda: (), lambda cache, variables, i: cache, lambda positions: positions, batch)


def miner(task: Task, data: ClientData, variables: Variables, batch_size: int) -> Miner:
    """What chooses the batches of a client under this task; `variables` show the shapes."""
    how = task.mining
    if how is None:
        return plain_batches(batch_size)
    each = anchors_of(batch_size, how.negatives)
    length = -(-data.max_size // batch_size) * batch_size
    everything = jnp.arange(length, dtype=jnp.int32)
    real = everything < data.size
    labels = plain(client_batch(data, everything).labels)

    def embed(variables, positions):
        batch = task.prepare(client_batch(data, positions), None)
        return task.forward(variables, batch, None).logits

    def empty():
        found = jax.eval_shape(embed, variables, everything[:1])
        return jnp.zeros((length, found.shape[1]), found.dtype)

    def refresh(cache, variables):
        def one(i, cache):
            rows = i * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
            found = embed(variables, rows)
            return jax.lax.dynamic_update_slice(cache, found, (i * batch_size, 0))

        return jax.lax.fori_loop(0, -(-data.size // batch_size), one, cache)

    def refreshed(cache, variables, i):
        return jax.lax.cond(
            i % how.every == 0, refresh, lambda cache, variables: cache, cache, variables
        )

    def related(rows):
        """(positive, negative) of the images at these positions, with all."""
        positive, negative = how.relation.between(labels[rows], labels)
        there = real[None] & real[rows][:, None]
        return positive & there & (rows[:, None] != everything[None]), negative & there

    def usable():
        def one(rows):
            positive, negative = related(rows)
            return jnp.any(positive, axis=1) & jnp.any(negative, axis=1)

        size = min(AT_ONCE, length)
        padded = jnp.arange(-(-length // size) * size, dtype=jnp.int32).reshape(-1, size)
        return jax.lax.map(one, jnp.minimum(padded, length - 1)).reshape(-1)[:length]

    can = usable()

    def anchors(positions):
        order = jnp.argsort(~can[positions], stable=True)
        return positions[order], jnp.sum(can, dtype=jnp.int32)

    def batch(cache, anchors, i):
        order, count = anchors
        turn = i * each + jnp.arange(each, dtype=jnp.int32)
        rows = order[turn % jnp.maximum(count, 1)]
        positive, negative = related(rows)
        found = triplets(
            similarities(cache[rows], cache), positive, negative,
            negatives=how.negatives, choose=how.positive,
        )
        none = jnp.int32(length)
        chosen = jnp.concatenate([
            jnp.where(count > 0, rows, none),
            jnp.where(found.has_positive, found.positive.astype(jnp.int32), none),
            jnp.where(found.has_negative, found.negative.astype(jnp.int32), none).reshape(-1),
        ])
        chosen = chosen[:batch_size]
        chosen = jnp.pad(chosen, (0, batch_size - chosen.shape[0]), constant_values=length)
        same = jnp.tril(chosen[:, None] == chosen[None], -1)
        return jnp.where(jnp.any(same, axis=1), none, chosen)

    return Miner(empty, refreshed, anchors, batch)


def anchors_of(batch_size: int, negatives: int) -> int:
    """A: how many anchors a batch has room for, one at least."""
    if batch_size < 3:
        raise errors.UsageError(
            f"client.batch_size = {batch_size} with task.mine_every: expected at least 3 images, "
            "an anchor, its positive and a negative."
        )
    return max(1, batch_size // (2 + negatives))
