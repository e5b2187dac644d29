"""MOON: representations near the global model's and far from the client's own last ones.

Li, He, Song, "Model-contrastive federated learning" (CVPR 2021). z is what the classifier reads, of
the local model, of the one that was received (z_g), and of the client's own at the end of its last
round (z_p).

    local loss   f_k(w) + mu mean over the batch of l,
                 l = -log(e^a / (e^a + e^b)),   a = cos(z, z_g) / tau,   b = cos(z, z_p) / tau

A client that has not trained yet has no z_p: then z_p = z_g, and l = log 2 pulls nowhere. (In the
released code such a client has a random network of its own.) The paper's z comes from a projection
head of two layers before the classifier: `model.projection=256`; without one it is whatever the
classifier reads. A cosine with a vector of zeros is 0. With mu = 0 it is FedAvg.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat import errors
from fedjax_flat.algorithms.addition import Addition, Beside, beside, with_term
from fedjax_flat.algorithms.method import Method
from fedjax_flat.client import Term, terms
from fedjax_flat.settings import Setting


class Last(NamedTuple):
    """The client's model at the end of its last round, if it had one."""

    model: Any
    there: jax.Array


def moon(*, mu: float = 1.0, tau: float = 0.5) -> Addition:
    """Contrast between the received model and the client's last one."""
    errors.at_least("mu", mu, 0)
    errors.positive("tau", tau)

    def contrast(client, anchor, data):
        last = data.brought["moon"]
        previous = jax.tree.map(lambda a, b: jnp.where(last.there, a, b), last.model, anchor)

        def loss(outputs, batch, others):
            own = terms.features_of("moon", outputs)
            near, far = (cosine(own, other) / tau for other in others)
            return mu * terms.batch_mean(jax.nn.softplus(far - near), batch)

        def context(batch):
            return [terms.features_of("moon", client.task.forward(model, batch, None))
                    for model in (anchor, previous)]

        return Term(loss, context)

    what = Beside(
        client=lambda variables: Last(variables, jnp.asarray(False)),
        bring=lambda sent, last: last,
        keep=lambda last, info: Last(info.model, jnp.asarray(True)),
    )
    return Addition(with_term(contrast), lambda algorithm, task: beside(algorithm, "moon", what))


def cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    """Of the angle between two representations of each example; 0 if one of them is zero."""
    unit = lambda x: x * jax.lax.rsqrt(
        jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), 1e-16)
    )
    return jnp.sum(unit(a) * unit(b), axis=-1)


METHOD = Method(
    "moon", "Li 2021", "contrast with the client's last model",
    add=lambda settings: moon(**settings),
    settings={
        "mu": Setting(1.0, "weight of the contrast", at_least=0),
        "tau": Setting(0.5, "temperature", above=0),
    },
)
