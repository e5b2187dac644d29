"""Any algorithm whose server takes another mean of the uploads: trimmed, the median, FoolsGold's.

The rules and their papers are in server/robust.py. SLSGD is the trimmed mean with server SGD of
rate alpha: w <- (1 - alpha) w + alpha trim(w_1 .. w_m) = w - alpha trim(w - w_1 .. w - w_m).

FoolsGold's weights a_k multiply the uploads Delta_k:

    share   examples     sum_k p_k a_k Delta_k,  p_k the weights without FoolsGold
            mean         sum_k a_k Delta_k / m
            sum          sum_k a_k Delta_k                                       (the paper)
            normalised   sum_k a_k Delta_k / sum_k a_k

Similarities are those of the cohort; in the paper everybody takes part. H is server state, one row
per client, of the whole upload or of its classifier, as in the authors' code for deep networks.

Uploads must be one mean; what a method sums, or looks at one by one, would not be protected.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat import errors, parts
from fedjax_flat.algorithms.base import Algorithm, Exchange, Reply
from fedjax_flat.models import CLASSIFIER
from fedjax_flat.server import aggregate
from fedjax_flat.server.robust import foolsgold_weights, trimmed_mean

AGGREGATES = ("mean", "trimmed_mean", "median", "foolsgold")
SHARES = ("examples", "mean", "sum", "normalised")
FEATURES = ("all", "classifier")


class Remembered(NamedTuple):
    """The algorithm's own state, and H: a row per client."""

    inner: Any
    histories: jax.Array


class Named(NamedTuple):
    """What a client sent, and who it is."""

    upload: Any
    client: jax.Array


def robust(algorithm: Algorithm, *, trim: int | None = None) -> Algorithm:
    """`algorithm` with the trimmed mean of uploads; without `trim`, their median."""
    if trim is not None:
        errors.at_least("trim", trim, 0)

    def rule(part: Exchange) -> Exchange:
        def local(*arguments):
            reply = only_mean(part.local(*arguments), "server.aggregate")
            return reply._replace(mean=(), each=reply.mean)

        def update(server, uploads, round):
            mean = trimmed_mean(uploads.each, uploads.weights > 0, trim)
            return part.update(server, uploads._replace(mean=mean, each=()), round)

        return part._replace(local=local, update=update)

    return algorithm._replace(exchanges=tuple(rule(part) for part in algorithm.exchanges))


def foolsgold(
    algorithm: Algorithm, *, kappa: float = 1.0, share: str = "examples", features: str = "all"
) -> Algorithm:
    """`algorithm` with uploads weighted by how little they resemble each other over time."""
    errors.positive("kappa", kappa)
    weigh = errors.lookup("foolsgold.share", share, _SHARES)
    errors.lookup("foolsgold.features", features, dict.fromkeys(FEATURES))
    if len(algorithm.exchanges) > 1:
        raise errors.UsageError(
            "foolsgold with a method of two exchanges per round: a client's history is of one kind "
            "of upload. Choose a method with one, e.g. fedavg."
        )
    (part,) = algorithm.exchanges

    def init(variables, num_clients):
        server, client = algorithm.init(variables, num_clients)
        size = _features(variables, features, 0).size
        return Remembered(server, jnp.zeros((num_clients, size), jnp.float32)), client

    def local(message, state, data, round, key):
        reply = only_mean(part.local(message, state, data, round, key), "foolsgold")
        who = jnp.asarray(data.client, jnp.int32)
        return reply._replace(mean=(), each=Named(reply.mean, who))

    def update(server, uploads, round):
        present = uploads.weights > 0
        sent, who = uploads.each
        # Slots without a client sent zeros, to whichever row.
        histories = server.histories.at[who].add(_features(sent, features, 1))
        a = foolsgold_weights(histories[who], present, kappa)
        weights = weigh(a, uploads.weights, present.astype(a.dtype))
        mean = jax.tree.map(lambda x: jnp.tensordot(weights.astype(x.dtype), x, 1), sent)
        inner, metrics = part.update(
            server.inner, uploads._replace(mean=mean, each=()), round
        )
        heard = aggregate.mean(jnp.sum(a), uploads.clients)
        return Remembered(inner, histories), {**metrics, "foolsgold": heard}

    personal = algorithm.personal
    return algorithm._replace(
        init=init,
        exchanges=(part._replace(
            broadcast=lambda server, round: part.broadcast(server.inner, round), local=local,
            update=update,
        ),),
        models=lambda server: algorithm.models(server.inner),
        personal=personal and (lambda server, state: personal(server.inner, state)),
    )


def only_mean(reply: Reply, who: str) -> Reply:
    """A reply whose upload is one mean, and numbers less than an array beside it."""
    for more, does in ((reply.each, "looks at each by itself"), (reply.sum, "sums them too")):
        if any(jnp.ndim(x) for x in jax.tree.leaves(more)):
            raise errors.UsageError(
                f"{who}: it replaces the mean of the uploads, and this method {does}. Choose one "
                "that only averages, e.g. fedavg, fedprox, fedavgm, fedadam."
            )
    return reply


def _features(tree: Any, features: str, axis: int) -> jax.Array:
    """What of uploads is compared, as vectors; `axis` axes of them stand before the leaves'."""
    wanted = lambda name: not parts.statistics(name) and (
        features == "all" or CLASSIFIER in name.split("/")
    )
    found = list(parts.take(tree, wanted).values())
    if not found:
        raise errors.UsageError(
            f"foolsgold.features = {features}: this model has no module named {CLASSIFIER}."
        )
    return jnp.concatenate([x.reshape(*x.shape[:axis], -1) for x in found], axis=axis)


_SHARES: dict[str, Callable[[jax.Array, jax.Array, jax.Array], jax.Array]] = {
    "examples": lambda a, weights, there: aggregate.mean(a * weights, jnp.sum(weights)),
    "mean": lambda a, weights, there: aggregate.mean(a, jnp.sum(there)),
    "sum": lambda a, weights, there: a,
    "normalised": lambda a, weights, there: aggregate.mean(a, jnp.sum(a)),
}
