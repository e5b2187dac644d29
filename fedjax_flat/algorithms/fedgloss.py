"""FedGloSS: SAM on the server. NaiveFedGloSS is the same with an ascent that costs an exchange.

Caldarola et al., "Beyond local sharpness: communication-efficient global sharpness-aware
minimization for federated learning" (CVPR 2025). Equation numbers are those of Caldarola's PhD
thesis (Politecnico di Torino, 2024).

    message      x~ = x + eps,   eps = rho_s D / ||D||          (4.6), (4.7); 0 while D = 0
                 D = the pseudo-gradient of the round before    (FedGloSS)
                 D = one of this round's cohort, sent x first   (NaiveFedGloSS)
    local step   w <- w - eta_l (g - h_k + (w - x~) / beta)
    afterwards   h_k <- h_k - (w_k - x~) / beta
    server       h <- h - 1 / (beta K) sum over the cohort of (w_k - x~)
                 x <- x - Delta~ - beta h,   Delta~ = sum_k (n_k / n) (x~ - w_k)     (4.8)

Without duals the terms in h and beta go. With rho_s = 0 it is FedDyn with alpha = 1 / beta.
`measured` asks the cohort for Delta at x too, at the price of NaiveFedGloSS, and reports
delta_eps = rho_s ||D / ||D|| - Delta / ||Delta|| || (4.10).

Where the paper and its released code differ, `variant`:
    "paper"      the line above; the server radius is rho_s throughout
    "released"   h changes by 1 / |cohort| of it; during the warm-up of the clients' radius the
                 server uses the clients' final radius
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_flat import errors
from fedjax_flat.algorithms.base import Algorithm, Exchange, combine, difference, replies, zeros
from fedjax_flat.algorithms.method import Method, Parts
from fedjax_flat.client import Client, drift
from fedjax_flat.client.sharpness import scaled_to
from fedjax_flat.models import Variables
from fedjax_flat.settings import Setting


class FedGloSSState(NamedTuple):
    """The unperturbed model x, D, h (or (), without duals) and K."""

    model: Variables
    direction: Any
    dual: Any
    num_clients: jax.Array


class Radius(NamedTuple):
    """rho_s; and `early` instead of it for the first `early_rounds` rounds."""

    rho: float
    early: float = 0.0
    early_rounds: int = 0

    def at(self, round: Any) -> jax.Array:
        """The server radius in a round."""
        return jnp.where(round + 1 <= self.early_rounds, self.early, self.rho)


def fedgloss(
    client: Client,
    *,
    radius: Radius,
    beta: float,
    duals: bool = True,
    naive: bool = False,
    measured: bool = False,
    variant: str = "paper",
    weighting: str = "examples",
) -> Algorithm:
    """FedGloSS, or NaiveFedGloSS if `naive`; the clients' own SAM is in `client`."""
    reply = replies(weighting)
    per_client = errors.lookup("variant", variant, {"paper": False, "released": True})
    errors.positive("beta", beta)
    errors.at_least("server rho", radius.rho, 0)

    def init(variables, num_clients):
        zero = zeros(variables.params)
        dual = zero if duals else ()
        return FedGloSSState(variables, zero, dual, jnp.float32(num_clients)), dual

    def train(message, dual, data, round, key):
        near = drift.dynamic(dual, 1 / beta) if duals else None
        trained, info, _ = client.train(message, data, key, round=round, drift=near)
        return difference(message, trained), info

    def probe(message, dual, data, round, key):
        delta, info = train(message, dual, data, round, key)
        # The client only lends itself: nothing of what it trained here is kept.
        return reply(data, dual, info._replace(model=()), mean=delta.params)

    def point(server, uploads, round):
        """What an exchange at x itself is for: the ascent direction, or its error."""
        new = uploads.mean
        if naive:
            return server._replace(direction=new), {}
        rho = radius.at(round)
        gap = difference(scaled_to(1.0, server.direction), scaled_to(1.0, new))
        return server, {"delta_eps": rho * optax.tree.norm(gap)}

    def perturbed(server, round):
        eps = scaled_to(radius.at(round), server.direction)
        return server.model._replace(params=combine(server.model.params, 1.0, eps))

    def local(message, dual, data, round, key):
        delta, info = train(message, dual, data, round, key)
        if duals:
            dual = combine(dual, 1 / beta, delta.params)
        return reply(data, dual, info, mean=delta, sum=delta.params if duals else ())

    def update(server, uploads, round):
        del round
        model, dual = difference(server.model, uploads.mean), ()
        if duals:
            share = 1 / (beta * server.num_clients)
            share = share / jnp.maximum(uploads.clients, 1) if per_client else share
            dual = combine(server.dual, share, uploads.sum)
            model = model._replace(params=combine(model.params, -beta, dual))
        return FedGloSSState(model, uploads.mean.params, dual, server.num_clients), {}

    first = Exchange(lambda server, round: server.model, probe, point)
    main = Exchange(perturbed, local, update)
    return Algorithm(
        init=init,
        exchanges=(first, main) if naive or measured else (main,),
        models=lambda server: {"global": server.model},
    )


def _make(parts: Parts, naive: bool) -> Algorithm:
    settings, client = dict(parts.settings), parts.config.client
    early = client.rho_warmup if settings["variant"] == "released" else 0
    radius = Radius(settings.pop("rho"), client.rho, early)
    return fedgloss(
        parts.client, radius=radius, naive=naive, weighting=parts.weighting, **settings
    )


_SETTINGS = {
    "rho": Setting(0.15, "the server's radius; client.rho is the clients'", at_least=0),
    "beta": Setting(10.0, "strength of the duals' constraint, 1 / FedDyn's alpha", above=0),
    "duals": Setting(True, "with the terms of ADMM"),
    "measured": Setting(False, "report the error of the ascent, at the price of an exchange"),
    "variant": Setting("paper", "or as the released code", choices=("paper", "released")),
}
METHOD = (
    Method(
        "fedgloss", "Caldarola 2025", "SAM on the server, the last ascent",
        lambda p: _make(p, naive=False), _SETTINGS, optimizer="own",
    ),
    Method(
        "naivefedgloss", "Caldarola 2025", "SAM on the server, an ascent exchanged",
        lambda p: _make(p, naive=True), _SETTINGS, "fedgloss", optimizer="own",
    ),
)
