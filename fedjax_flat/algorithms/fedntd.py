"""FedNTD: the global model teaches what it knows of the classes that an example is not.

Lee et al., "Preservation of the global knowledge by not-true distillation in federated learning"
(NeurIPS 2022).

    local loss   CE(y, q) + beta tau^2 KL(p~_g || p~),     mean over the batch
                 p~: softmax of logits / tau over all classes but the true one, of the local model
                 p~_g: of the global model that was received

The factor tau^2 is that of the authors' later code and of distillation in general; an earlier state
of it has none, and at their tau = 1 there is no difference. Some implementations take
KL(p~ || p~_g): `reverse`. With beta = 0 it is FedAvg.
"""

import jax
import jax.numpy as jnp

from fedjax_flat import errors
from fedjax_flat.algorithms.addition import Addition, with_term
from fedjax_flat.algorithms.method import Method
from fedjax_flat.client import Term, terms
from fedjax_flat.settings import Setting


def fedntd(*, beta: float = 1.0, tau: float = 1.0, reverse: bool = False) -> Addition:
    """Not-true distillation from the model that a client received."""
    errors.at_least("beta", beta, 0)
    errors.positive("tau", tau)

    def teach(client, anchor, data):
        del data

        def loss(outputs, batch, teacher):
            terms.check_classes("fedntd", outputs, batch)
            return beta * tau**2 * terms.batch_mean(
                not_true_divergence(teacher.logits, outputs.logits, batch.labels, tau, reverse),
                batch,
            )

        return Term(loss, context=terms.outputs_of(client.task, anchor))

    return Addition(with_term(teach))


def not_true_divergence(
    teacher: jax.Array, student: jax.Array, labels: jax.Array, tau: float, reverse: bool
) -> jax.Array:
    """KL of the two softmaxes without the true class, per example."""
    true = jax.nn.one_hot(labels, student.shape[-1], dtype=bool)
    others = lambda logits: jax.nn.log_softmax(jnp.where(true, -jnp.inf, logits / tau), axis=-1)
    target, other = others(teacher), others(student)
    if reverse:
        target, other = other, target
    gap = jnp.where(true, 0.0, target) - jnp.where(true, 0.0, other)
    return jnp.sum(jnp.where(true, 0.0, jnp.exp(target)) * gap, axis=-1)


METHOD = Method(
    "fedntd", "Lee 2022", "the anchor teaches what is not true",
    add=lambda settings: fedntd(**settings),
    settings={
        "beta": Setting(1.0, "weight of the distillation", at_least=0),
        "tau": Setting(1.0, "temperature", above=0),
        "reverse": Setting(False, "divergence from the student to the teacher"),
    },
)
