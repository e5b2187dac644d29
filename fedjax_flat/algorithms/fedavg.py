"""FedAvg in the form of FedOpt, and FedProx, which only adds a term to the local objective.

McMahan et al., "Communication-efficient learning of deep networks from decentralized data"
(AISTATS 2017); Hsu et al., "Measuring the effects of non-identical data distribution for federated
visual classification" (2019); Reddi et al., "Adaptive federated optimization" (ICLR 2021); Li et
al., "Federated optimization in heterogeneous networks" (MLSys 2020). With SAM or ASAM on clients it
is FedSAM or FedASAM: Caldarola et al., "Improving generalization in federated learning by seeking
flat minima" (ECCV 2022).

    w_k     <- E epochs of the client optimiser from w on f_k   (FedProx: + mu / 2 ||w_k - w||^2)
    Delta   =  sum_k (n_k / n) (w - w_k),   n = sum of n_k over the cohort     (pseudo-gradient)
    w       <- SERVEROPT(w, Delta)                     (SGD with rate 1 is FedAvg)
"""

from typing import Any, NamedTuple

import optax

from fedjax_flat import errors
from fedjax_flat.algorithms.addition import Addition
from fedjax_flat.algorithms.base import Algorithm, Exchange, difference, replies
from fedjax_flat.algorithms.method import Method, Parts
from fedjax_flat.client import Client, drift
from fedjax_flat.models import Variables
from fedjax_flat.settings import Setting


class FedAvgState(NamedTuple):
    """The global model and the server optimiser's state."""

    model: Variables
    opt_state: Any


def fedavg(
    client: Client,
    server_optimizer: optax.GradientTransformation,
    *,
    weighting: str = "examples",
    mu: float = 0.0,
) -> Algorithm:
    """FedAvg, clients weighted by n_k (`examples`) or `uniform`; with mu > 0, FedProx."""
    reply = replies(weighting)
    errors.at_least("mu", mu, 0)

    def init(variables, num_clients):
        del num_clients
        return server_start(server_optimizer, variables), ()

    def local(message, state, data, round, key):
        near = drift.proximal(mu) if mu else None
        trained, info, _ = client.train(message, data, key, round=round, drift=near)
        return reply(data, state, info, mean=difference(message, trained))

    def update(server, uploads, round):
        del round
        return server_step(server_optimizer, server, uploads.mean), {}

    return Algorithm(
        init=init,
        exchanges=(Exchange(lambda server, round: server.model, local, update),),
        models=lambda server: {"global": server.model},
    )


def server_start(
    server_optimizer: optax.GradientTransformation, variables: Variables
) -> FedAvgState:
    """The state before the first round."""
    return FedAvgState(variables, server_optimizer.init(variables.params))


def server_step(
    server_optimizer: optax.GradientTransformation, server: FedAvgState, delta: Variables
) -> FedAvgState:
    """w <- SERVEROPT(w, pseudo-gradient); statistics move by all of their difference."""
    params, stats = server.model
    updates, opt_state = server_optimizer.update(delta.params, server.opt_state, params)
    model = Variables(optax.apply_updates(params, updates), difference(stats, delta.stats))
    return FedAvgState(model, opt_state)


def _make(parts: Parts) -> Algorithm:
    return fedavg(
        parts.client, parts.server_optimizer, weighting=parts.weighting, **parts.settings
    )


METHOD = (
    Method("fedavg", "McMahan 2017", "weighted mean of locally trained models", _make),
    Method(
        "fedsam", "Caldarola 2022", "FedAvg with SAM on clients", sharpness="sam",
        add=lambda settings: Addition(),  # the ascent is the client's, of whatever method
    ),
    Method(
        "fedasam", "Caldarola 2022", "FedAvg with ASAM on clients", sharpness="asam",
        add=lambda settings: Addition(),
    ),
    Method("fedavgm", "Hsu 2019", "momentum on the server", _make, optimizer="sgd with momentum"),
    Method("fedadam", "Reddi 2021", "Adam on the server", _make, optimizer="adam"),
    Method("fedadagrad", "Reddi 2021", "Adagrad on the server", _make, optimizer="adagrad"),
    Method("fedyogi", "Reddi 2021", "Yogi on the server", _make, optimizer="yogi"),
    Method(
        "fedprox", "Li 2020", "clients stay near the global model", _make,
        settings={"mu": Setting(0.1, "strength of the proximal term", at_least=0)},
    ),
)
