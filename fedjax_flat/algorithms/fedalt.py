"""FedAlt: a part of the model stays with each client, and the two parts are trained in turns.

Pillutla et al., "Federated learning with partial model personalization" (ICML 2022); phase 3 of
Fani's thesis (2025), section 4.2. The model is u, shared, and v_k, client k's own.

    v_k  <- E epochs of the client optimiser from v_k on f_k(u, .),      u frozen
    u_k  <- E epochs, from a fresh optimiser, from u on f_k(., v_k),     v_k frozen
    v_k stays; Delta = sum_k (n_k / n) (u - u_k),   u <- SERVEROPT(u, Delta)

As in the authors' program both halves have E epochs (`client.epochs`, or `client.steps`), each with
an order of examples of its own; an example is visited twice as often as under FedSim, and the
metrics count that. The drift is that of the second half, of what is shared.
"""

import optax

from fedjax_flat import errors, parts, rng
from fedjax_flat.algorithms.base import Algorithm
from fedjax_flat.algorithms.fedavg import fedavg
from fedjax_flat.algorithms.fedsim import OWN
from fedjax_flat.algorithms.method import Method
from fedjax_flat.algorithms.personal import personal
from fedjax_flat.client import Client
from fedjax_flat.client.local import LocalResult


def fedalt(
    client: Client,
    server_optimizer: optax.GradientTransformation,
    *,
    own: parts.Part = parts.head,
    weighting: str = "examples",
) -> Algorithm:
    """FedAvg with `own` kept by the clients, who train it first."""
    return personal(fedavg(in_turns(client, own), server_optimizer, weighting=weighting), own)


def in_turns(client: Client, own: parts.Part) -> Client:
    """A client that trains its own part, then the rest."""

    def train(variables, data, key, *, frozen=None, **rest) -> LocalResult:
        half = lambda still, name: {
            "frozen": parts.either(frozen, still), "key": rng.fold(key, name), **rest
        }
        first = client.train(variables, data, **half(lambda name: not own(name), "own"))
        kept = parts.take(first.info.model, own)
        data = data.replace(own={**data.own, **kept})
        second = client.train(variables, data, **half(own, "shared"))
        both = optax.tree.add(first.info.sums, second.info.sums)
        steps = first.info.steps + second.info.steps
        return second._replace(info=second.info._replace(sums=both, steps=steps))

    return client._replace(
        train=train, steps=lambda data: 2 * client.steps(data),
        on=lambda task: in_turns(client.on(task), own),
    )


def _own(text: str) -> parts.Part:
    if text in ("none", "all"):
        raise errors.UsageError(
            f"algorithm.fedalt.own = {text!r}: expected an own part and a shared one, to be "
            "trained in turns; head, features, or patterns of leaves' names. FedSim takes all and "
            "none."
        )
    part = parts.named(text)
    assert part
    return part


METHOD = Method(
    "fedalt", "Pillutla 2022", "own part, then shared part trained",
    lambda p: fedalt(
        p.client, p.server_optimizer, own=_own(p.settings["own"]), weighting=p.weighting
    ),
    settings={"own": OWN._replace(doc="what stays: head, features, or patterns of leaves' names")},
)
