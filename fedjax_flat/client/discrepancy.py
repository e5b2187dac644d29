"""Steps of two classifiers on one generator: Saito et al.'s A, B and C (algorithms/mcd.py).

A model of two is a pair: its parameters are {"model": of the network, "second": the second
classifier by name}. Each step trains a part of it and leaves the others as they are, bit for bit;
generator and classifiers have optimisers of their own, so that neither's momentum moves the other's
weights. What is measured (BatchNorm's statistics) moves with the generator: in A with the source,
in every C with the target. One mask of dropout is for both classifiers. Auxiliary heads whose
classifier has another name are the generator's, and in the losses of both.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_flat import debug, errors, parts, rng
from fedjax_flat.client.local import Stepper
from fedjax_flat.data import Batch, Examples, count_of
from fedjax_flat.data.federated import client_batch, shuffled_positions, whole
from fedjax_flat.models import Outputs, Variables
from fedjax_flat.tasks import Task, count, masked_sum

GENERATOR, CLASSIFIERS = "generator", "classifiers"
_PARTS: dict[str, parts.Part] = {
    GENERATOR: lambda name: not parts.head(name), CLASSIFIERS: parts.head,
}
Source = Callable[[Any], Batch]  # the stored batch of labelled examples of a step


def discrepancy(first: jax.Array, second: jax.Array, real: jax.Array) -> jax.Array:
    """Mean of |p1 - p2| over classes and real units; p are the softmaxes of logits."""
    p, q = (jax.nn.softmax(z.astype(jnp.float32), axis=-1) for z in (first, second))
    each = jnp.mean(jnp.abs(p - q), axis=-1)
    return masked_sum(each, real) / jnp.maximum(count(real), 1)


def real_units(logits: jax.Array, batch: Batch, ignored: int) -> jax.Array:
    """Which units count: real examples, or their pixels that are not labelled `ignored`."""
    shape = logits.shape
    if len(shape) == 2 and shape[1] > 1:
        return batch.mask
    if len(shape) == 4 and shape[3] > 1 and jnp.shape(batch.labels) == shape[:3]:
        return batch.mask.reshape(-1, 1, 1) & (batch.labels != ignored)
    raise errors.UsageError(
        f"mcd with outputs of shape {shape} and labels of shape {jnp.shape(batch.labels)}: "
        "expected classes of images or of pixels, task.name = 'classification' or 'segmentation'."
    )


def both(task: Task, pair: Variables, batch: Batch, key: jax.Array | None) -> Outputs:
    """Outputs of the two classifiers, stacked, on one pass of the generator."""
    model, second = pair.params["model"], pair.params["second"]
    heads = jax.tree.map(lambda *x: jnp.stack(x), parts.take(model, parts.head), second)

    def one(head):
        found = task.forward(Variables(parts.put(model, head), pair.stats), batch, key)
        return found.logits, found.stats, found.auxiliary

    # What does not depend on the classifier is not mapped, and so computed once.
    logits, stats, auxiliary = jax.vmap(one, out_axes=(0, None, 0))(heads)
    return Outputs(logits, (), stats, (), auxiliary)


def total_loss(task: Task, outputs: Outputs, batch: Batch) -> jax.Array:
    """The task's mean losses of both classifiers, added up."""

    def one(i):
        logits, auxiliary = jax.tree.map(lambda x: x[i], (outputs.logits, outputs.auxiliary))
        sums = task.measure(outputs._replace(logits=logits, auxiliary=auxiliary), batch)
        return sums["loss"] / jnp.maximum(sums["units"], 1)

    return one(0) + one(1)


def merged(pair: Variables) -> Variables:
    """The network with the mean of both classifiers: the mean of their logits."""
    model, second = pair.params["model"], pair.params["second"]
    head = jax.tree.map(lambda a, b: 0.5 * (a + b), parts.take(model, parts.head), second)
    return Variables(parts.put(model, head), pair.stats)


class Steps:
    """A, B and C: (pair, states, ...) -> (pair, states, what was measured before)."""

    def __init__(
        self, task: Task, optimizer: optax.GradientTransformation, round: Any = 0, *,
        ignored: int = 255,
    ):
        self.task, self.round, self.ignored = task, round, ignored
        self.optimizer = optax.with_extra_args_support(optimizer)

    def init(self, params: Any) -> dict[str, Any]:
        """States of the optimisers."""
        return {n: self.optimizer.init(parts.take(params, part)) for n, part in _PARTS.items()}

    def a(self, pair, states, source: Batch, key) -> tuple[Variables, Any, jax.Array]:
        """All: down the losses of both classifiers on the source, whose sum is returned."""

        def loss(pair):
            outputs = both(self.task, pair, source, key)
            found = total_loss(self.task, outputs, source)
            return found, (outputs.stats, found)

        return self._descend(loss, pair, states, (GENERATOR, CLASSIFIERS))

    def b(
        self, pair, states, source: Batch | None, target: Batch, key
    ) -> tuple[Variables, Any, Any]:
        """Classifiers: down the losses on the source (if there is one), minus the discrepancy.

        Returned are the target's discrepancy, real units and sums by the mean of the logits.
        """

        def loss(pair):
            outputs, apart, real = self._apart(pair, target, rng.fold(key, "target"))
            mean = outputs._replace(logits=jnp.mean(outputs.logits, axis=0), auxiliary=())
            seen = apart, count(real), self.task.measure(mean, target)
            if source is None:
                return -apart, (pair.stats, seen)
            labelled = both(self.task, pair, source, rng.fold(key, "source"))
            return total_loss(self.task, labelled, source) - apart, (pair.stats, seen)

        return self._descend(loss, pair, states, (CLASSIFIERS,))

    def c(self, pair, states, target: Batch, key) -> tuple[Variables, Any, jax.Array]:
        """Generator: down the discrepancy on the target, which is returned."""

        def loss(pair):
            outputs, apart, _ = self._apart(pair, target, key)
            return apart, (outputs.stats, apart)

        return self._descend(loss, pair, states, (GENERATOR,))

    def _apart(self, pair, target: Batch, key) -> tuple[Outputs, jax.Array, jax.Array]:
        """(outputs, discrepancy, which units are real) on the target."""
        outputs = both(self.task, pair, target, key)
        real = real_units(outputs.logits[0], target, self.ignored)
        return outputs, discrepancy(outputs.logits[0], outputs.logits[1], real), real

    def _descend(self, loss, pair, states, whose: Sequence[str]):
        own = {name: parts.take(pair.params, _PARTS[name]) for name in whose}

        def of(own):
            params = pair.params
            for values in own.values():
                params = parts.put(params, values)
            return loss(pair._replace(params=params))

        grads, (stats, seen) = jax.grad(of, has_aux=True)(own)
        params, states = pair.params, dict(states)
        for name, grad in grads.items():
            updates, states[name] = self.optimizer.update(
                grad, states[name], own[name], round=self.round
            )
            params = parts.put(params, optax.apply_updates(own[name], updates))
        return Variables(params, stats), states, seen

    def stepper(self, *, repeats: int, source: Source | None = None) -> Stepper:
        """A and B on the source batch of a step, if there is one; B and C on the loop's batch.

        Where no unit of the target is real, A is all.
        """
        errors.at_least("n", repeats, 0)

        def take(pair, states, stored, key, *, step=0, **where):
            target = self.task.prepare(stored, rng.fold(key, "augment"))
            labelled = None
            if source is not None:
                labelled = self.task.prepare(source(step), rng.fold(key, "augment source"))
                pair, states, _ = self.a(pair, states, labelled, rng.fold(key, "a"))
            begin = pair, states
            pair, states, (_, units, sums) = self.b(
                pair, states, labelled, target, rng.fold(key, "b")
            )
            pair, states = jax.lax.fori_loop(
                0, repeats,
                lambda i, now: self.c(now[0], now[1], target, rng.fold(key, "c", i))[:2],
                (pair, states),
            )
            pair, states = jax.tree.map(
                lambda new, old: jnp.where(units > 0, new, old), (pair, states), begin
            )
            debug.check({"params": pair.params}, step=step, **where)
            return pair, states, sums

        return Stepper(self.init, take)


def in_turn(examples: Examples, batch_size: int, key: jax.Array, first: Any = 0) -> Source:
    """`batch(i)`: that of step `first + i`, of passes over all examples in ever new orders.

    A pass ends before a batch that would not be full; fewer examples than one batch are one.
    """
    size = count_of(examples)
    batches = max(size // batch_size, 1)
    length = max(batches * batch_size, size)
    stored = whole(examples)

    def batch(i):
        turn, place = (first + i) // batches, (first + i) % batches
        order = shuffled_positions(rng.fold(key, turn), size, length)
        here = jax.lax.dynamic_slice_in_dim(order, place * batch_size, batch_size)
        return client_batch(stored, here)

    return batch
