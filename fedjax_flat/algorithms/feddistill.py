"""FedDistill: clients teach each other with what they say, on average, of each class.

Jeong et al., "Communication-efficient on-device machine learning: federated distillation and
augmentation under non-IID private data" (2018): FedDistill, in which logits are all that travels.
Zhu, Hong, Zhou, "Data-free knowledge distillation for heterogeneous federated learning" (ICML 2021)
compare with FedDistill+, the same beside FedAvg: the addition `feddistill_plus`, to any method.

    client       Z_k[c] = mean of the logits over its examples of class c, when training is over
    server       Z[c] = mean of Z_k[c] over the clients that had c, as of the last round with any
    local loss   f_k(w) + gamma mean over the batch of KL(softmax(Z[y]) || softmax(z))

A class of which nothing is known yet has no term. The teacher includes the client's own share,
which the original leaves out. Under FedDistill clients never see another model: each trains its
own (`eval.clients` reports them), and what is called global is the model they all started from.
Outputs are averaged as logits; the text speaks of outputs.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat import errors
from fedjax_flat.algorithms.addition import Addition, Beside, added, beside, shapes_of, with_term
from fedjax_flat.algorithms.base import Algorithm, Exchange, replies
from fedjax_flat.algorithms.method import Method
from fedjax_flat.client import Client, Term, terms
from fedjax_flat.data import ClientData
from fedjax_flat.models import Variables
from fedjax_flat.settings import Setting

NAME = "feddistill"


class Labels(NamedTuple):
    """Mean logits of every class, (classes, classes), and of which there are any."""

    logits: Any
    known: Any


def feddistill(client: Client, *, gamma: float = 1.0, weighting: str = "examples") -> Algorithm:
    """Clients with models of their own that exchange mean logits alone."""
    return added(lambda worker: by_themselves(worker, weighting), client,
                 feddistill_plus(gamma=gamma))


def feddistill_plus(*, gamma: float = 1.0) -> Addition:
    """Mean logits of every class teach, beside any method."""
    errors.at_least("gamma", gamma, 0)

    def teach(client, anchor, data):
        del client, anchor
        teacher = data.brought[NAME]

        def loss(outputs, batch, context):
            del context
            terms.check_classes("feddistill", outputs, batch)
            pull = terms.divergence(teacher.logits[batch.labels], outputs.logits)
            return gamma * terms.batch_mean(
                jnp.where(teacher.known[batch.labels], pull, 0.0), batch
            )

        return Term(loss)

    def measure(client: Client) -> Client:
        def train(variables, data, key, **rest):
            result = client.train(variables, data, key, **rest)
            info = result.info
            labels = mean_logits(client, info.model, data)
            return result._replace(
                info=info._replace(measured={**info.measured, NAME: labels})
            )

        return client._replace(train=train, on=lambda task: measure(client.on(task)))

    def around(algorithm, task):
        def start(variables):
            classes = shapes_of(task, variables).logits.shape[-1]
            return Labels(jnp.zeros((classes, classes)), jnp.zeros(classes, bool))

        what = Beside(
            server=start, upload=lambda info: info.measured[NAME],
            learn=lambda kept, model, each, present: over_clients(kept, each, present),
        )
        return beside(algorithm, NAME, what)

    return Addition(lambda client: measure(with_term(teach)(client)), around)


def mean_logits(client: Client, model: Variables, data: ClientData) -> Labels:
    """Z_k: the mean of the model's logits over the client's examples of each class."""

    def of_batch(stored):
        batch = client.task.prepare(stored, None)
        logits = client.task.forward(model, batch, None).logits
        one_hot = jax.nn.one_hot(batch.labels, logits.shape[-1], dtype=logits.dtype)
        one_hot = jnp.where(batch.mask.reshape(-1, 1), one_hot, 0)
        return one_hot.T @ logits, jnp.sum(one_hot, axis=0)

    total, count = client.over(of_batch, data)
    return Labels(total / jnp.maximum(count, 1).reshape(-1, 1), count > 0)


def over_clients(kept: Labels, each: Labels, present: jax.Array) -> Labels:
    """Z: the mean over the clients that have a class; as it was where nobody has."""
    has = each.known & present.reshape(-1, 1)
    count = jnp.sum(has.astype(jnp.float32), axis=0)
    total = jnp.sum(jnp.where(has[:, :, None], each.logits, 0.0), axis=0)
    mean = total / jnp.maximum(count, 1).reshape(-1, 1)
    any_has = count > 0
    return Labels(
        jnp.where(any_has.reshape(-1, 1), mean, kept.logits), kept.known | any_has
    )


def by_themselves(client: Client, weighting: str = "examples") -> Algorithm:
    """Every client trains a model of its own; nothing is exchanged."""
    reply = replies(weighting)

    def local(message, own, data, round, key):
        del message
        _, info, _ = client.train(own, data, key, round=round)
        return reply(data, info.model, info)

    return Algorithm(
        init=lambda variables, num_clients: (variables, variables),
        exchanges=(Exchange(
            lambda server, round: (), local, lambda server, uploads, round: (server, {})
        ),),
        models=lambda server: {"global": server},
        personal=lambda server, own: own,
    )


_SETTINGS = {"gamma": Setting(1.0, "weight of the distillation", at_least=0)}
METHOD = (
    Method(
        "feddistill", "Jeong 2018", "mean logits of each class, nothing else",
        lambda p: feddistill(p.client, weighting=p.weighting, **p.settings), _SETTINGS,
        optimizer="own",
    ),
    Method(
        "feddistill_plus", "Zhu 2021", "mean logits of each class teach",
        add=lambda settings: feddistill_plus(**settings), settings=_SETTINGS, group="feddistill",
    ),
)
