"""What is learned: a task is pure functions from examples to losses, and from sums to a report.

Everything about a batch is sums over units, divided once: a unit is what a loss counts, an image, a
pixel, a token. Sums of several batches, clients or devices add up.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat import errors
from fedjax_flat.data import Batch, Preprocess
from fedjax_flat.models import Model, Outputs, Units, Variables
from fedjax_flat.tasks.pairs import Relation

Sums = dict[str, Any]


class Mining(NamedTuple):
    """How clients choose the images of a batch: `every` so many steps their embeddings are new."""

    every: int
    relation: Relation
    negatives: int  # of an anchor
    positive: str  # closest | hardest


class Task(NamedTuple):
    """One kind of problem, with its network.

    `prepare` turns stored examples into network inputs, augmented with a key, only normalised
    without one. A key in `forward` switches training mode on; `at_blocks` is that of `Model.apply`.
    `score` names the entry of the report by which runs are compared: larger is better. `inputs` are
    the shapes and types of what the network reads, batch first, for those who ask before training;
    `units` is that of the network (models/units.py).

    Of a task on pairs, `mining` says that clients choose their batches (client/mining.py), and
    `search(outputs, labels)` has the sums of an evaluated split at once, in place of those of its
    batches; it is not compiled as a whole.
    """

    init: Callable[[jax.Array], Variables]
    prepare: Callable[[Batch, jax.Array | None], Batch]
    forward: Callable[..., Outputs]  # of (variables, batch, key or None, at_blocks=None)
    losses: Callable[[Outputs, Batch], tuple[jax.Array, jax.Array]]  # per unit, and which are real
    sums: Callable[[Outputs, Batch], Sums]
    report: Callable[[Sums], dict[str, jax.Array]]
    score: str
    inputs: Any = None
    units: Callable[[], Units | None] = lambda: None
    mining: Mining | None = None
    search: Callable[[jax.Array, Any], Sums] | None = None

    def measure(self, outputs: Outputs, batch: Batch) -> Sums:
        """Sums over a batch: loss, units, examples, and the task's own."""
        losses, mask = self.losses(outputs, batch)
        if losses.shape != mask.shape:
            raise errors.UsageError(
                f"the task's losses have shape {losses.shape}, its mask {mask.shape}: expected one "
                "loss per unit, and for each unit whether it is real."
            )
        return {
            "loss": masked_sum(losses, mask),
            "units": count(mask),
            "examples": count(batch.mask),
            **self.sums(outputs, batch),
        }

    def means(self, sums: Sums) -> dict[str, jax.Array]:
        """Loss per unit and the task's report; zero when there was no unit."""
        units = jnp.maximum(sums["units"], 1).astype(sums["loss"].dtype)
        means = {"loss": sums["loss"] / units, **self.report(sums)}
        if self.score not in means:
            raise errors.UsageError(
                f"the task's score {self.score!r} is not in its report: expected one of "
                f"{', '.join(means)}." + errors.did_you_mean(self.score, means)
            )
        return means

    def evaluate(self, variables: Variables, stored: Batch) -> Sums:
        """Sums over stored examples, in evaluation mode."""
        batch = self.prepare(stored, None)
        return self.measure(self.forward(variables, batch, None), batch)


def of_network(
    model: Model,
    preprocess: Preprocess,
    *,
    losses: Callable[[Outputs, Batch], tuple[jax.Array, jax.Array]],
    sums: Callable[[Outputs, Batch], Sums],
    report: Callable[[Sums], dict[str, jax.Array]],
    score: str,
) -> Task:
    """The task of a network that reads a batch's inputs and is compared with its labels."""

    def forward(variables, batch, key, at_blocks=None):
        return model.apply(variables, batch.inputs, key, batch.mask, at_blocks)

    return Task(
        model.init, preprocess.apply, forward, losses, sums, report, score, model.inputs,
        model.units,
    )


def masked_sum(values: jax.Array, mask: jax.Array) -> jax.Array:
    """The sum over real units: a choice, not a product, so that padding leaks no NaN."""
    return jnp.sum(jnp.where(mask, values, jnp.zeros((), values.dtype)))


def count(mask: jax.Array) -> jax.Array:
    """How many are real."""
    return jnp.sum(mask.astype(jnp.float32))
