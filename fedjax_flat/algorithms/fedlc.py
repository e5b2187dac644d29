"""FedLC, FedRS and WSM: logits calibrated by how many examples of each class a client has.

Zhang et al., "Federated learning with label distribution skew via logits calibration" (ICML 2022):
FedLC. Li and Zhan, "FedRS: federated learning with restricted softmax for label distribution non-
IID data" (KDD 2021). Legate et al., "Re-weighted softmax cross-entropy to control forgetting in
federated learning" (CoLLAs 2023): WSM. n_c is the client's number of examples of class c.

    local loss   cross-entropy of the true class under softmax(s z + b), in the place of softmax(z)

    FedLC        s = 1,                              b_c = -tau n_c^(-1/4)
    FedRS        s_c = 1, or alpha where n_c = 0,    b = 0
    WSM          s = 1,                              b_c = log n_c     (-log(n_y e^z_y / sum n e^z))

Under FedLC and WSM a class that the client lacks leaves the softmax, the limit n_c -> 0. FedLC's
denominator is sometimes written without the true class; here it is an ordinary softmax. Only the
cross-entropy changes: terms of other methods and accuracies see the logits as they are. FedRS with
alpha = 1 is FedAvg.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_flat import errors
from fedjax_flat.algorithms.addition import Addition, shapes_of
from fedjax_flat.algorithms.method import Method
from fedjax_flat.client import Client, terms
from fedjax_flat.data import ClientData
from fedjax_flat.settings import Setting
from fedjax_flat.tasks import Task

Rule = Callable[[jax.Array], tuple[jax.Array, jax.Array]]  # counts -> (s, b), one of each per class


def fedlc(*, tau: float = 1.0) -> Addition:
    """Larger margins for the classes of which a client has few examples."""
    errors.at_least("tau", tau, 0)
    shift = lambda n: jnp.where(n > 0, -tau * jnp.maximum(n, 1.0) ** -0.25, -jnp.inf)
    return _calibrated("fedlc", lambda n: (jnp.ones_like(n), shift(n)))


def fedrs(*, alpha: float = 0.5) -> Addition:
    """Smaller logits of the classes of which a client has no example."""
    errors.at_least("alpha", alpha, 0)
    return _calibrated("fedrs", lambda n: (jnp.where(n > 0, 1.0, alpha), jnp.zeros_like(n)))


def wsm() -> Addition:
    """A softmax weighted by the client's class shares."""
    shift = lambda n: jnp.where(n > 0, jnp.log(jnp.maximum(n, 1.0)), -jnp.inf)
    return _calibrated("wsm", lambda n: (jnp.ones_like(n), shift(n)))


def _calibrated(name: str, rule: Rule) -> Addition:
    def change(client: Client) -> Client:
        def train(variables, data, key, **rest):
            classes = shapes_of(client.task, variables).logits.shape[-1]
            task = _with_logits(client.task, name, *rule(class_counts(client, data, classes)))
            return client.on(task).train(variables, data, key, **rest)

        return client._replace(train=train, on=lambda task: change(client.on(task)))

    return Addition(change, innermost=True)


def _with_logits(task: Task, name: str, scale: jax.Array, shift: jax.Array) -> Task:
    """The task whose loss is of scale * logits + shift."""

    def losses(outputs, batch):
        terms.check_classes(name, outputs, batch)
        row = lambda x: x.reshape(1, -1)
        calibrated = row(scale) * outputs.logits + row(shift)
        return task.losses(outputs._replace(logits=calibrated), batch)

    return task._replace(losses=losses)


def class_counts(client: Client, data: ClientData, classes: int) -> jax.Array:
    """How many examples of each class a client has."""

    def of_batch(stored):
        one_hot = jax.nn.one_hot(stored.labels, classes, dtype=jnp.float32)
        return jnp.sum(jnp.where(stored.mask.reshape(-1, 1), one_hot, 0.0), axis=0)

    return client.over(of_batch, data)


METHOD = (
    Method(
        "fedlc", "Zhang 2022", "margins by the client's class counts",
        add=lambda settings: fedlc(**settings),
        settings={"tau": Setting(1.0, "size of the margins", at_least=0)},
    ),
    Method(
        "fedrs", "Li 2021", "smaller logits of absent classes",
        add=lambda settings: fedrs(**settings),
        settings={"alpha": Setting(0.5, "factor of those logits; 1 is FedAvg", at_least=0)},
    ),
    Method("wsm", "Legate 2023", "softmax weighted by class shares", add=lambda settings: wsm()),
)
