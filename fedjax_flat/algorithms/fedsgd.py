"""FedSGD: one gradient over all examples of every client, averaged; one server step.

McMahan et al., "Communication-efficient learning of deep networks from decentralized data"
(AISTATS 2017).

    w <- SERVEROPT(w, sum_k (n_k / n) gradient of f_k at w)

With all clients, SGD and weights n_k / n this is gradient descent on the union of the data.
Statistics of the model stay as they are.
"""

import optax

from fedjax_flat.algorithms.base import Algorithm, Exchange, replies, zeros
from fedjax_flat.algorithms.fedavg import server_start, server_step
from fedjax_flat.algorithms.method import Method
from fedjax_flat.client import Client, full_gradient
from fedjax_flat.models import Variables


def fedsgd(
    client: Client,
    server_optimizer: optax.GradientTransformation,
    *,
    weighting: str = "examples",
) -> Algorithm:
    """FedSGD; the step size is the server optimiser's."""
    reply = replies(weighting)

    def init(variables, num_clients):
        del num_clients
        return server_start(server_optimizer, variables), ()

    def local(message, state, data, round, key):
        del round, key
        gradient, info = full_gradient(client, message, data)
        return reply(data, state, info, mean=gradient)

    def update(server, uploads, round):
        del round
        still = Variables(uploads.mean, zeros(server.model.stats))
        return server_step(server_optimizer, server, still), {}

    return Algorithm(
        init=init,
        exchanges=(Exchange(lambda server, round: server.model, local, update),),
        models=lambda server: {"global": server.model},
    )


METHOD = Method(
    "fedsgd", "McMahan 2017", "one full gradient per client",
    lambda p: fedsgd(p.client, p.server_optimizer, weighting=p.weighting), sharpness="no steps",
)
