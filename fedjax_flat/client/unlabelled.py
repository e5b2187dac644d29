"""The local loss of clients without labels: pseudo-labels, entropy, a teacher.

The equations are in algorithms/self_training.py. A unit is a pixel, or an example that has one
class; means are over all units of real examples, pseudo-label or not.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_flat.client import terms
from fedjax_flat.client.local import Client
from fedjax_flat.ops.select import largest
from fedjax_flat.settings import Setting
from fedjax_flat.tasks import Task

RULES = ("threshold", "fda", "released")
SETTINGS = {
    "entropy": Setting(1.0, "weight of the entropy of predictions", at_least=0),
    "teacher": Setting(1.0, "weight of KL(student || teacher)", at_least=0),
    "labels": Setting("student", "whose predictions are pseudo-labels",
                      choices=("student", "teacher")),
    "rule": Setting("fda", "which pseudo-labels are trusted", choices=RULES),
    "threshold": Setting(0.9, "confidence that is enough", at_least=0, at_most=1),
    "share": Setting(0.66, "of a class's units, by which its own confidence is set", at_least=0,
                     at_most=1),
}


def unlabelled(client: Client) -> Client:
    """The client, whose loss is its terms alone; the task's is still reported."""

    def losses(outputs, batch):
        each, mask = client.task.losses(outputs, batch)
        return jax.lax.stop_gradient(each), mask

    return client.on(client.task._replace(losses=losses))


def loss(logits: jax.Array, taught: jax.Array, mask: jax.Array, own: Mapping[str, Any]) -> Any:
    """The local loss; `taught` are the teacher's logits, `mask` says which examples are real."""
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    p = jnp.exp(log_p)
    guide = taught if own["labels"] == "teacher" else jax.lax.stop_gradient(logits)
    guess, kept = pseudo_labels(guide, mask, own["rule"], own["threshold"], own["share"])
    right = jnp.take_along_axis(log_p, guess[..., None], axis=-1)[..., 0]
    each = jnp.where(kept, -right, 0.0)
    if own["entropy"]:
        each = each - own["entropy"] * jnp.sum(p * log_p, axis=-1)
    if own["teacher"]:
        each = each + own["teacher"] * terms.divergence(logits, taught)
    return unit_mean(each, mask)


def unit_mean(each: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean over all units of real examples."""
    real = jnp.broadcast_to(mask.reshape(-1, *(1,) * (each.ndim - 1)), each.shape)
    count = jnp.maximum(jnp.sum(real.astype(jnp.float32)), 1)
    return jnp.sum(jnp.where(real, each, 0.0)) / count


def pseudo_labels(
    logits: jax.Array, mask: jax.Array, rule: str, threshold: float, share: float
) -> tuple[jax.Array, jax.Array]:
    """(the most probable class, whether it is trusted) of every unit of real examples."""
    p = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    guess, sure = jnp.argmax(p, axis=-1), jnp.max(p, axis=-1)
    real = jnp.broadcast_to(mask.reshape(-1, *(1,) * (sure.ndim - 1)), sure.shape)
    classes = jnp.arange(logits.shape[-1], dtype=guess.dtype)
    confident = sure > threshold
    if rule == "fda":

        def cut(c):
            mine = (real & (guess == c)).reshape(-1)
            n = jnp.sum(mine, dtype=jnp.int32)
            at = jnp.round(share * n.astype(jnp.float32)).astype(jnp.int32)
            values = jnp.where(mine, sure.reshape(-1), -1.0)
            top = largest(values, n - jnp.minimum(at, n - 1))
            return jnp.min(jnp.where(top & mine, values, 1.0))

        cuts = jnp.minimum(jax.lax.map(cut, classes), threshold)
        confident = sure >= cuts[guess]
    if rule == "released":

        def top(guess, sure):
            def of_class(c):
                mine = guess == c
                n = jnp.sum(mine, dtype=jnp.int32)
                wanted = jnp.floor(share * n.astype(jnp.float32)).astype(jnp.int32)
                return largest(jnp.where(mine, sure, -1.0), wanted) & mine

            return jnp.any(jax.lax.map(of_class, classes), axis=0)

        flat = lambda x: x.reshape(x.shape[0], -1)
        confident |= jax.vmap(top)(flat(guess), flat(sure)).reshape(sure.shape)
    return guess, real & confident


def logits_of(task: Task, model: Any) -> Any:
    """The context of a teacher: its logits."""
    return lambda batch: task.forward(model, batch, None).logits
