"""Any algorithm whose server sees the sum of the uploads and no single one.

Bonawitz et al., "Practical secure aggregation for privacy-preserving machine learning" (CCS 2017);
the masks are in wire/masks.py.

    client   y_k = mask(n_k Delta_k in fixed point, n_k),    every entry of Delta_k within +- bound
    server   Delta = (sum of n_k Delta_k) / (sum of n_k), of those whose upload arrived

Members of a cohort that send nothing, because they have no examples or drop out on the way with
probability `dropout`, are recovered from: their pair masks are opened. With fewer uploads than
`threshold` nothing can be opened, and the round changes nothing. The server announces who is in the
cohort; keys and shares, which real clients exchange beforehand, are not counted as traffic. Every
client draws a mask of the model's size for every other: the work grows with the square of the
cohort.

Uploads must be one mean. The rest of a round, its loss and drift, is measured as without it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat import errors, rng
from fedjax_flat.algorithms.base import Algorithm, Exchange
from fedjax_flat.algorithms.robust import only_mean
from fedjax_flat.wire import masks


class Announced(NamedTuple):
    """The algorithm's own message, and who is in the cohort, -1 for nobody."""

    message: Any
    members: jax.Array


class Masked(NamedTuple):
    """What the algorithm sums, and a vector of whole numbers under masks."""

    sum: Any
    masked: Any


class _Vector(NamedTuple):
    weighted: Any  # n_k Delta_k
    weight: jax.Array  # n_k


def secure(
    algorithm: Algorithm,
    members: Callable[[jax.Array], jax.Array],
    *,
    largest: float,
    fraction_bits: int = 16,
    bound: float = 1.0,
    threshold: int = 1,
    dropout: float = 0.0,
    seed: int = 0,
) -> Algorithm:
    """`algorithm` with masked uploads; `members(round)` is who is in the cohort, -1 for nobody.

    `largest` is the largest weight of a client, its examples or 1.
    """
    errors.positive("secure.bound", bound)
    errors.at_least("secure.threshold", threshold, 1)
    errors.below_one("secure.dropout", dropout)
    slots = jax.eval_shape(members, jax.ShapeDtypeStruct((), jnp.int32)).shape[0]
    if threshold > slots:
        raise errors.UsageError(
            f"secure.threshold = {threshold}: a cohort has at most {slots} clients, so that no "
            "round could ever be opened."
        )
    most = slots * largest * bound  # that an entry of the sum can reach
    if not most * 2.0**fraction_bits < 2.0**31:
        raise errors.UsageError(
            f"secure.fraction_bits = {fraction_bits}: {slots} clients of up to {largest:g} "
            f"examples with changes of up to {bound:g} may sum to {most:g}, which needs "
            f"{fraction_bits + most.__ceil__().bit_length() + 1} of 32 bits. Lower "
            "secure.fraction_bits or secure.bound."
        )

    def hidden(i: int, part: Exchange) -> Exchange:
        key_of = lambda round: rng.fold(jax.random.key(seed), "secure", i, round)

        def local(message, state, data, round, key):
            reply = part.local(message.message, state, data, round, key)
            reply = only_mean(reply, "secure.sum")
            n = jnp.asarray(reply.weight, jnp.float32)
            weighted = jax.tree.map(lambda x: n * jnp.clip(x, -bound, bound), reply.mean)
            x = _Vector(masks.encode(weighted, fraction_bits), n.astype(jnp.uint32))
            who = jnp.asarray(data.client, jnp.int32)
            y = masks.masked(key_of(round), who, x, message.members)
            arrives = jax.random.uniform(rng.fold(key, "drop-out", i)) >= dropout
            return reply._replace(
                mean=(), sum=Masked(reply.sum, y), weight=jnp.float32(1),
                present=reply.present & arrives,
            )

        def update(server, uploads, round):
            who, sent = members(round), uploads.weights > 0
            total = masks.unmasked(key_of(round), uploads.sum.masked, who, sent)
            n = jnp.maximum(total.weight, 1).astype(jnp.float32)
            mean = jax.tree.map(lambda x: x / n, masks.decode(total.weighted, fraction_bits))
            uploads = uploads._replace(mean=mean, sum=uploads.sum.sum)
            new, metrics = part.update(server, uploads, round)
            enough = uploads.clients >= threshold
            server = jax.tree.map(lambda new, old: jnp.where(enough, new, old), new, server)
            lost = jnp.sum(((who >= 0) & ~sent).astype(jnp.float32))
            return server, {**metrics, "lost": lost}

        announce = lambda message, round: Announced(message, members(round))
        address = part.address
        return part._replace(
            broadcast=lambda server, round: announce(part.broadcast(server, round), round),
            local=local,
            update=update,
            address=address and (lambda common, state, client: common._replace(
                message=address(common.message, state, client)
            )),
        )

    return algorithm._replace(
        exchanges=tuple(hidden(i, part) for i, part in enumerate(algorithm.exchanges))
    )
