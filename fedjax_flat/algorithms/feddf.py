"""FedDF: the server distils the cohort's models into their mean, on examples without labels.

Lin et al., "Ensemble distillation for robust model fusion in federated learning" (NeurIPS 2020).

    w   <- FedAvg of the cohort's models w_k
    then, on batches of unlabelled examples x, as many steps as are asked for:
    w   <- w - optimiser's step on KL(softmax(mean_k z_k(x)) || softmax(z(x))),  mean over the batch

The teachers count alike. The examples are a share of the train examples that no client keeps, their
labels dropped: `data.unlabelled`; the paper takes those of another data set, or makes them. Batches
come in turn, round after round. The paper stops early on validation examples: here the number of
steps is fixed. All networks are in evaluation mode. Without steps it is FedAvg.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_flat import errors
from fedjax_flat.algorithms.base import Algorithm
from fedjax_flat.algorithms.fedavg import fedavg, server_step
from fedjax_flat.algorithms.method import Method
from fedjax_flat.client import Client, terms
from fedjax_flat.client.optimizer import named
from fedjax_flat.data import Batch
from fedjax_flat.models import Variables
from fedjax_flat.server import aggregate
from fedjax_flat.settings import Setting
from fedjax_flat.tasks import Task


def feddf(
    client: Client,
    server_optimizer: optax.GradientTransformation,
    *,
    steps: int = 100,
    batch_size: int = 128,
    optimizer: str = "adam",
    learning_rate: float = 1e-3,
    weighting: str = "examples",
) -> Algorithm:
    """FedAvg, then distillation on the server; clients train as they do there."""
    errors.at_least("steps", steps, 0)
    errors.at_least("batch_size", batch_size, 1)
    base = fedavg(client, server_optimizer, weighting=weighting)
    (exchange,) = base.exchanges
    descent = named(optimizer, learning_rate)

    def local(message, state, data, round, key):
        reply = exchange.local(message, state, data, round, key)
        return reply._replace(mean=(), each=reply.mean)

    def update(server, uploads, round):
        fused = server_step(
            server_optimizer, server, aggregate.mean_of(uploads.each, uploads.weights)
        )
        teachers = jax.tree.map(lambda w, d: w[None] - d, server.model, uploads.each)
        batches = _in_turn(uploads.unlabelled, batch_size, round * steps)
        params, kl = distilled(
            client.task, descent, fused.model, teachers, uploads.weights > 0, batches, steps
        )
        model = fused.model._replace(params=params)
        return fused._replace(model=model), {"distillation": kl}

    return base._replace(exchanges=(exchange._replace(local=local, update=update),))


def distilled(
    task: Task, optimizer: optax.GradientTransformation, student: Variables, teachers: Variables,
    present: jax.Array, batches: Any, steps: int,
) -> tuple[Any, jax.Array]:
    """(the student's parameters after `steps` steps towards the mean of the teachers, last KL)."""

    def mean_logits(batch):
        logits = lambda model: task.forward(model, batch, None).logits
        zero = jnp.zeros_like(logits(student))
        add = lambda total, one: (total + jnp.where(one[1], logits(one[0]), 0.0), None)
        total, _ = jax.lax.scan(add, zero, (teachers, present))
        return total / jnp.maximum(jnp.sum(present.astype(jnp.float32)), 1)

    def step(i, carry):
        params, state, _ = carry
        batch = task.prepare(batches(i), None)
        target = jax.lax.stop_gradient(mean_logits(batch))

        def loss(params):
            logits = task.forward(Variables(params, student.stats), batch, None).logits
            return jnp.mean(terms.divergence(target, logits))

        kl, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, kl

    start = (student.params, optimizer.init(student.params), jnp.zeros(()))
    params, _, kl = jax.lax.fori_loop(0, steps, step, start)
    return params, kl


def _in_turn(inputs: Any, batch_size: int, first: jax.Array) -> Any:
    """`batch(i)`: the batch after `first + i` others, around and around."""
    if inputs is None:
        raise errors.UsageError(
            "feddf without unlabelled examples: expected a share of the train examples for the "
            "server, e.g. data.unlabelled = 0.1."
        )
    count = jax.tree.leaves(inputs)[0].shape[0]

    def batch(i):
        place = ((first + i) * batch_size + jnp.arange(batch_size)) % count
        return Batch(jax.tree.map(lambda x: x[place], inputs), (), jnp.ones(batch_size, bool))

    return batch


METHOD = Method(
    "feddf", "Lin 2020", "the server distils the cohort's models",
    lambda p: feddf(p.client, p.server_optimizer, weighting=p.weighting, **p.settings),
    settings={
        "steps": Setting(100, "of distillation in a round; 0 is FedAvg", at_least=0),
        "batch_size": Setting(128, "unlabelled examples in a step", at_least=1),
        "optimizer": Setting("adam", "of the distillation, any of optax"),
        "learning_rate": Setting(1e-3, "of the distillation", at_least=0),
    },
    unlabelled=True,
)
