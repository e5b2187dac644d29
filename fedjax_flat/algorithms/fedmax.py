"""FedMAX: what the classifier reads has as much entropy as possible.

Chen, Bhardwaj, Marculescu, "FedMAX: mitigating activation divergence for accurate and
communication-efficient federated learning" (ECML PKDD 2020).

    local loss   f_k(w) + beta mean over the batch of KL(U || softmax(a))
                 a: the features that the classifier reads, U uniform over them

The authors' code takes the mean over the features too, that is beta / width in the place of beta.
With beta = 0 it is FedAvg.
"""

import jax.numpy as jnp

from fedjax_flat import errors
from fedjax_flat.algorithms.addition import Addition, with_term
from fedjax_flat.algorithms.method import Method
from fedjax_flat.client import Term, terms
from fedjax_flat.settings import Setting


def fedmax(*, beta: float = 1000.0) -> Addition:
    """Activations of maximal entropy."""
    errors.at_least("beta", beta, 0)

    def loss(outputs, batch, context):
        del context
        features = terms.features_of("fedmax", outputs)
        return beta * terms.batch_mean(
            terms.divergence(jnp.zeros_like(features), features), batch
        )

    return Addition(with_term(lambda client, anchor, data: Term(loss)))


METHOD = Method(
    "fedmax", "Chen 2020", "features of maximal entropy",
    add=lambda settings: fedmax(**settings),
    settings={"beta": Setting(1000.0, "weight of the divergence from uniform", at_least=0)},
)
