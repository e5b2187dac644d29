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
    "released"   h changes by 1 / |cohort| of it; while the clients' radius warms up, from rho_0 to
                 rho_l in T_s rounds, both radii are (rounds t from 0; the paper counts from 1)
                     clients   rho_0 + (rho_l - rho_0) t / T_s
                     server    rho_0 for t = 0,   rho_l + (rho_s - rho_0) / T_s for t = 1 .. T_s
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_flat import errors
from fedjax_flat.algorithms.base import Algorithm, Exchange, combine, difference, replies, zeros
from fedjax_flat.algorithms.method import Method, Parts
from fedjax_flat.client import Client, drift, warm_up
from fedjax_flat.client.optimizer import Schedule, rate_of
from fedjax_flat.client.sharpness import scaled_to
from fedjax_flat.models import Variables
from fedjax_flat.settings import Setting


class FedGloSSState(NamedTuple):
    """The unperturbed model x, D, h (or (), without duals) and K."""

    model: Variables
    direction: Any
    dual: Any
    num_clients: jax.Array


def fedgloss(
    client: Client,
    *,
    rho: float | Schedule,
    beta: float,
    duals: bool = True,
    naive: bool = False,
    measured: bool = False,
    variant: str = "paper",
    sharpness: optax.GradientTransformation | None = None,
    weighting: str = "examples",
) -> Algorithm:
    """FedGloSS, or NaiveFedGloSS if `naive`; the clients' own SAM is in `client`.

    `rho` is the server's radius; `sharpness` replaces the clients' SAM.
    """
    reply = replies(weighting)
    per_client = errors.lookup("variant", variant, {"paper": False, "released": True})
    errors.positive("beta", beta)
    if not callable(rho):
        errors.at_least("server rho", rho, 0)

    def init(variables, num_clients):
        zero = zeros(variables.params)
        dual = zero if duals else ()
        return FedGloSSState(variables, zero, dual, jnp.float32(num_clients)), dual

    def train(message, dual, data, round, key):
        near = drift.dynamic(dual, 1 / beta) if duals else None
        trained, info, _ = client.train(
            message, data, key, round=round, drift=near, sharpness=sharpness
        )
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
        gap = difference(scaled_to(1.0, server.direction), scaled_to(1.0, new))
        return server, {"delta_eps": rate_of(rho, round) * optax.tree.norm(gap)}

    def perturbed(server, round):
        eps = scaled_to(rate_of(rho, round), server.direction)
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
    settings, client, sharpness = dict(parts.settings), parts.config.client, None
    if settings["variant"] == "released" and client.rho_warmup > 1:
        start, end, rounds = client.rho_start, client.rho, client.rho_warmup
        sharpness = parts.sharpness(warm_up(start, end, rounds, first=0))
        settings["rho"] = released_radius(settings["rho"], start, end, rounds)
    return fedgloss(
        parts.client, naive=naive, sharpness=sharpness, weighting=parts.weighting, **settings
    )


def released_radius(rho: float, start: float, end: float, rounds: int) -> Schedule:
    """The server's radius while the clients' goes from `start` to `end`; then `rho`."""

    def radius(round):
        early = jnp.where(round == 0, start, end + (rho - start) / rounds)
        return jnp.where(round <= rounds, early, rho)

    return radius


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
