"""FedAvg in the form of FedOpt.

McMahan et al., "Communication-efficient learning of deep networks from decentralized data"
(AISTATS 2017); Reddi et al., "Adaptive federated optimization" (ICLR 2021).

    w_k     <- E epochs of the client optimiser from w on the examples of client k
    Delta   =  sum_k (n_k / n) (w - w_k),   n = sum of n_k over the cohort     (pseudo-gradient)
    w       <- SERVEROPT(w, Delta)                     (SGD with rate 1 is FedAvg)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_flat import errors
from fedjax_flat.algorithms.base import Algorithm, ClientResult
from fedjax_flat.client.local import LocalTraining


class FedAvgState(NamedTuple):
    """The global model and the server optimiser's state."""

    params: Any
    opt_state: Any


WEIGHTINGS = {
    "examples": lambda size: jnp.asarray(size, jnp.float32),
    "uniform": lambda size: (jnp.asarray(size) > 0).astype(jnp.float32),
}


def fedavg(
    train: LocalTraining,
    server_optimizer: optax.GradientTransformation,
    *,
    weighting: str = "examples",
) -> Algorithm:
    """FedAvg with local training `train`, clients weighted by n_k (`examples`) or `uniform`."""
    weigh = errors.lookup("weighting", weighting, WEIGHTINGS)

    def init(params, num_clients):
        del num_clients
        return FedAvgState(params, server_optimizer.init(params)), ()

    def local(message, client_state, data, round, key):
        params, info = train(message, data, key, round=round)
        upload = jax.tree.map(jnp.subtract, message, params)
        return ClientResult(upload, weigh(data.size), client_state, info)

    def update(server, pseudo_gradient):
        updates, opt_state = server_optimizer.update(
            pseudo_gradient, server.opt_state, server.params
        )
        return FedAvgState(optax.apply_updates(server.params, updates), opt_state)

    return Algorithm(
        init=init,
        broadcast=lambda server: server.params,
        local=local,
        update=update,
        models=lambda server: {"global": server.params},
    )
