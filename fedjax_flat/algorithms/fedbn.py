"""FedBN and SiloBN: normalisation stays with the client.

Li et al., "FedBN: federated learning on non-IID features via local batch normalization" (ICLR
2021): scale, shift and statistics of every normalisation layer stay. Andreux et al., "Siloed
federated learning for multi-centric histopathology datasets" (DART 2020), SiloBN: only the
statistics stay, scale and shift are shared.

    w_k = (shared part of w, client k's own part) -> local training -> the shared part is averaged

Normalisation layers are the modules with Norm in their name.
"""

import optax

from fedjax_flat import parts
from fedjax_flat.algorithms.base import Algorithm
from fedjax_flat.algorithms.fedavg import fedavg
from fedjax_flat.algorithms.method import Method
from fedjax_flat.algorithms.personal import personal
from fedjax_flat.client import Client


def fedbn(
    client: Client,
    server_optimizer: optax.GradientTransformation,
    *,
    own: parts.Part = parts.normalisation,
    weighting: str = "examples",
) -> Algorithm:
    """FedAvg with `own` kept by the clients: all of normalisation, or its statistics."""
    return personal(fedavg(client, server_optimizer, weighting=weighting), own)


METHOD = (
    Method(
        "fedbn", "Li 2021", "normalisation stays with the client",
        lambda p: fedbn(p.client, p.server_optimizer, weighting=p.weighting),
    ),
    Method(
        "silobn", "Andreux 2020", "statistics stay with the client",
        lambda p: fedbn(
            p.client, p.server_optimizer, own=parts.statistics, weighting=p.weighting
        ),
    ),
)
