"""FedAvg in the form of FedOpt, and FedProx, which only adds a term to the local objective.

McMahan et al., "Communication-efficient learning of deep networks from decentralized data"
(AISTATS 2017); Reddi et al., "Adaptive federated optimization" (ICLR 2021); Li et al., "Federated
optimization in heterogeneous networks" (MLSys 2020).

    w_k     <- E epochs of the client optimiser from w on f_k   (FedProx: + mu / 2 ||w_k - w||^2)
    Delta   =  sum_k (n_k / n) (w - w_k),   n = sum of n_k over the cohort     (pseudo-gradient)
    w       <- SERVEROPT(w, Delta)                     (SGD with rate 1 is FedAvg)
"""

from typing import Any, NamedTuple

import optax

from fedjax_flat import errors
from fedjax_flat.algorithms.base import (
    WEIGHTINGS,
    Algorithm,
    ClientResult,
    Exchange,
    difference,
)
from fedjax_flat.client import Client, drift


class FedAvgState(NamedTuple):
    """The global model and the server optimiser's state."""

    params: Any
    opt_state: Any


def fedavg(
    client: Client,
    server_optimizer: optax.GradientTransformation,
    *,
    weighting: str = "examples",
    mu: float = 0.0,
) -> Algorithm:
    """FedAvg, clients weighted by n_k (`examples`) or `uniform`; with mu > 0, FedProx."""
    weigh = errors.lookup("weighting", weighting, WEIGHTINGS)
    errors.at_least("mu", mu, 0)

    def init(params, num_clients):
        del num_clients
        return FedAvgState(params, server_optimizer.init(params)), ()

    def local(message, state, data, round, key):
        near = drift.proximal(mu) if mu else None
        params, info, _ = client.train(message, data, key, round=round, drift=near)
        return ClientResult(difference(message, params), weigh(data.size), state, info)

    def update(server, uploads, round):
        del round
        return server_step(server_optimizer, server, uploads.pseudo_gradient), {}

    return Algorithm(
        init=init,
        exchanges=(Exchange(lambda server, round: server.params, local, update),),
        models=lambda server: {"global": server.params},
    )


def server_step(
    server_optimizer: optax.GradientTransformation, server: FedAvgState, pseudo_gradient: Any
) -> FedAvgState:
    """w <- SERVEROPT(w, pseudo-gradient)."""
    updates, opt_state = server_optimizer.update(pseudo_gradient, server.opt_state, server.params)
    return FedAvgState(optax.apply_updates(server.params, updates), opt_state)
