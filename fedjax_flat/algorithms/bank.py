"""Several models trained side by side and merged now and then: what chains and clusters share.

The server keeps a bank W_1 .. W_m and what each was trained on since the last merge, p_1 .. p_m.
Member k of a cohort trains one of them, i(k), from where it stands:

    W_i  <-  W_i - sum over k with i(k) = i of (n_k / n) (W_i - w_k)        p_i <- p_i + n
    every R rounds:   w <- sum_i (p_i / sum p) W_i,   W_i <- w,   p_i <- 0

Between merges `merged` evaluates the last merged model w; `bank` the mean of the bank by p, which
is what a merge would give now. Nobody else sees a difference.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat import errors
from fedjax_flat.algorithms.base import Algorithm, Exchange, difference, replies
from fedjax_flat.client import Client
from fedjax_flat.data import ClientData
from fedjax_flat.models import Variables
from fedjax_flat.server import aggregate
from fedjax_flat.settings import Setting
from fedjax_flat.wire import bits_of, models_in

EVALUATED = Setting(
    "merged", "between merges: the last merged model, or the mean of the bank",
    choices=("merged", "bank"),
)


class BankState(NamedTuple):
    """The last merged model, the bank, and what each was trained on since; R."""

    model: Variables
    bank: Variables
    mass: jax.Array
    every: jax.Array


class Trained(NamedTuple):
    """What a member sends, and which of the bank it is of."""

    delta: Variables
    which: jax.Array


def bank(
    client: Client,
    models: int,
    which: Callable[[ClientData], Any],
    *,
    every: int = 0,
    evaluated: str = "merged",
    weighting: str = "examples",
) -> Algorithm:
    """`models` models, of which a member trains the one that `which` says; merged `every` rounds.

    Every 0 is as many rounds as there are members to draw cohorts from.
    """
    reply = replies(weighting)
    errors.at_least("models", models, 1)
    errors.at_least("every", every, 0)
    EVALUATED.check("evaluated", evaluated)

    def init(variables, num_clients):
        copies = jax.tree.map(lambda x: jnp.repeat(x[None], models, axis=0), variables)
        period = jnp.int32(every or num_clients)
        return BankState(variables, copies, jnp.zeros(models, jnp.float32), period), ()

    def local(message, state, data, round, key):
        i = jnp.minimum(jnp.asarray(which(data), jnp.int32), models - 1)
        start = jax.tree.map(lambda x: x[i], message)
        trained, info, _ = client.train(start, data, key, round=round)
        return reply(data, state, info, each=Trained(difference(start, trained), i))

    def update(server, uploads, round):
        delta, who = uploads.each
        by_model = lambda x: jax.ops.segment_sum(x, who, models)
        weight = by_model(uploads.weights)

        def moved(w, d):
            shape = (-1, *[1] * (d.ndim - 1))
            total = by_model(uploads.weights.reshape(shape).astype(d.dtype) * d)
            return w - aggregate.mean(total, weight.reshape(shape))

        trained = jax.tree.map(moved, server.bank, delta)
        server = server._replace(bank=trained, mass=server.mass + weight)
        merged = mixed(server)
        now = (round + 1) % server.every == 0
        back = lambda w, m: jnp.where(now, jnp.broadcast_to(m[None], w.shape), w)
        return server._replace(
            model=jax.tree.map(lambda m, w: jnp.where(now, m, w), merged, server.model),
            bank=jax.tree.map(back, server.bank, merged),
            mass=jnp.where(now, 0.0, server.mass),
        ), {}

    def mixed(server):
        share = server.mass / jnp.maximum(jnp.sum(server.mass), 1e-30)
        mean = lambda w, m: jnp.where(
            jnp.sum(server.mass) > 0, jnp.tensordot(share.astype(w.dtype), w, 1), m
        )
        return jax.tree.map(mean, server.bank, server.model)

    def weigh(message, upload, own):
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), message)
        return bits_of(models_in(one, own)), bits_of(models_in(upload, own))

    look = mixed if evaluated == "bank" else lambda server: server.model
    return Algorithm(
        init=init,
        exchanges=(Exchange(lambda server, round: server.bank, local, update, bits=(weigh,)),),
        models=lambda server: {"global": look(server)},
    )
