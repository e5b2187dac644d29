"""FedSim: a part of the model stays with each client, and both parts are trained at once.

Pillutla et al., "Federated learning with partial model personalization" (ICML 2022); phase 3 of
Fani's thesis (2025), section 4.2. The model is u, shared, and v_k, client k's own.

    u_k, v_k  <- E epochs of the client optimiser from (u, v_k) on f_k, both parts in every step
    v_k stays; Delta = sum_k (n_k / n) (u - u_k),   u <- SERVEROPT(u, Delta)

Only u travels. The own part is `head` (FedSim(psi) in the thesis), `features` (FedSim(phi)), or any
pattern of leaves' names. With `none` this is FedAvg, bit for bit; with `all` each client trains a
model of its own and nothing is sent. A client evaluates (u, v_k) with the newest u.
"""

import optax

from fedjax_flat import parts
from fedjax_flat.algorithms.base import Algorithm
from fedjax_flat.algorithms.fedavg import fedavg
from fedjax_flat.algorithms.method import Method
from fedjax_flat.algorithms.personal import personal
from fedjax_flat.client import Client
from fedjax_flat.settings import Setting

OWN = Setting("head", "what stays: head, features, all, none, or patterns of leaves' names")


def fedsim(
    client: Client,
    server_optimizer: optax.GradientTransformation,
    *,
    own: parts.Part | None = parts.head,
    weighting: str = "examples",
) -> Algorithm:
    """FedAvg with `own` kept by the clients."""
    algorithm = fedavg(client, server_optimizer, weighting=weighting)
    return personal(algorithm, own) if own else algorithm


METHOD = Method(
    "fedsim", "Pillutla 2022", "own and shared part trained at once",
    lambda p: fedsim(
        p.client, p.server_optimizer, own=parts.named(p.settings["own"]), weighting=p.weighting
    ),
    settings={"own": OWN},
)
