"""FedSGD: one gradient over all examples of every client, averaged; one server step.

McMahan et al., "Communication-efficient learning of deep networks from decentralized data"
(AISTATS 2017).

    w <- SERVEROPT(w, sum_k (n_k / n) gradient of f_k at w)

With all clients, SGD and weights n_k / n this is gradient descent on the union of the data.
"""

import optax

from fedjax_flat import errors
from fedjax_flat.algorithms.base import WEIGHTINGS, Algorithm, ClientResult, Exchange
from fedjax_flat.algorithms.fedavg import FedAvgState, server_step
from fedjax_flat.client import Client
from fedjax_flat.client.local import no_training


def fedsgd(
    client: Client,
    server_optimizer: optax.GradientTransformation,
    *,
    weighting: str = "examples",
) -> Algorithm:
    """FedSGD; the step size is the server optimiser's."""
    weigh = errors.lookup("weighting", weighting, WEIGHTINGS)

    def init(params, num_clients):
        del num_clients
        return FedAvgState(params, server_optimizer.init(params)), ()

    def local(message, state, data, round, key):
        del round, key
        gradient = client.gradient(message, data)
        return ClientResult(gradient, weigh(data.size), state, no_training())

    def update(server, uploads, round):
        del round
        return server_step(server_optimizer, server, uploads.pseudo_gradient), {}

    return Algorithm(
        init=init,
        exchanges=(Exchange(lambda server, round: server.params, local, update),),
        models=lambda server: {"global": server.params},
    )
