"""Any algorithm in which a client trains a part of the model's units.

Federated Dropout: Caldas et al., "Expanding the reach of federated learning by reducing client
resource requirements" (2018). Heterogeneous Federated Dropout (HFD) and, with 8 bits down and an
encoded upload, CE-HFD: Mora, PhD thesis (University of Bologna, 2023). FjORD: Horvath et al.,
"FjORD: fair and accurate federated learning under heterogeneous targets with ordered dropout"
(NeurIPS 2021). Adaptive Federated Dropout: Bouacida et al. (2020).

    d_k          one of `tiers`, drawn per client and round, or client k's own, number k mod tiers
    kept         round(d_k N) of the N units of every hidden layer, at least 1; inputs and outputs
                 are never dropped
    sub_k        = Decode(Encode(Extract(w, kept)))            what client k receives
    Delta_k      = Remap(Decode(Encode(sub_k - its local model)), kept), 0 where units were dropped
    Delta        = sum_k p_k Delta_k, p_k as without sub-models: a unit that few have moves little
                 (coverage: every coordinate is divided by the p_k of those that have it, summed)

    units        random     drawn anew for every client and round
                 ordered    the first ceil(d_k N), nested: FjORD's, which also has coverage
                 adaptive   those of highest score for client k, equal ones at random. If the loss
                            of training fell from l' to l since the client's last visit, the units
                            trained gain (l' - l) / l' and are trained again, else chosen anew

Nothing is rescaled, on clients or afterwards. Scores are per client, and count as its state; the
paper's weighted draws and one map for all clients are left out, and so are FjORD's widths per local
step and self-distillation. The thesis prints a ceiling for the count of units, and counts that are
nearest integers (its Table 5.1).

A tier is a network of its own shape, so it costs fewer operations. Tiers are branches of one
`lax.switch`: where a cohort is mapped client by client only the client's own branch runs; under
`vmap` every client runs all of them, to the same numbers.

What is sent must be shaped like the model, and clients must keep nothing but scores.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat import errors, rng
from fedjax_flat.algorithms.base import Algorithm, Exchange, Reply
from fedjax_flat.algorithms.compressed import through
from fedjax_flat.models import units as units_lib
from fedjax_flat.models.units import Kept, Units
from fedjax_flat.tasks import Task
from fedjax_flat.wire import Codec, bits_of

CHOICES = ("random", "ordered", "adaptive")
ASSIGNMENTS = ("drawn", "fixed")


class Scored(NamedTuple):
    """The algorithm's own state of a client, and what is known of its units."""

    inner: Any
    scores: tuple[jax.Array, ...]
    kept: tuple[jax.Array, ...]  # masks: the units that it trained last
    again: jax.Array  # whether it trains them again
    loss: jax.Array  # of that training


class Covered(NamedTuple):
    """What the algorithm stacks, and which units each client has."""

    each: Any
    kept: tuple[jax.Array, ...]


class _Tier(NamedTuple):
    """Clients of one width: how many units they keep, and how they choose them."""

    structure: Units
    widths: tuple[int, ...]
    units: str

    def kept(self, state: Any, key: jax.Array) -> Kept:
        if self.units == "ordered":
            return [jnp.arange(m, dtype=jnp.int32) for m in self.widths]
        draws = unit_draws(key, self.structure.hidden)
        if self.units == "random":
            return [highest(u, m) for u, m in zip(draws, self.widths, strict=True)]
        pick = lambda u, m, s, old: jnp.where(
            state.again, jnp.nonzero(old, size=m)[0].astype(jnp.int32), highest(u, m, s)
        )
        every = zip(draws, self.widths, state.scores, state.kept, strict=True)
        return [pick(*one) for one in every]


def kept_count(width: int, share: float, units: str = "random") -> int:
    """How many of a layer's units a tier has."""
    # A product that is whole but for rounding counts as whole: 0.55 * 100 > 55 in binary.
    count = math.ceil(share * width - 1e-9) if units == "ordered" else round(share * width)
    return max(1, count)


def tier_of(key: jax.Array, client: Any, tiers: int, assignment: str = "drawn") -> jax.Array:
    """The number of a client's tier in a round whose key, for this client, is `key`."""
    if assignment == "fixed":
        return jnp.asarray(client, jnp.int32) % tiers
    return jax.random.randint(rng.fold(key, "tier"), (), 0, tiers, jnp.int32)


def unit_draws(key: jax.Array, hidden: Sequence[int]) -> list[jax.Array]:
    """A random number for every unit: the largest of a layer, or of its equals, are kept."""
    draw = lambda i, n: jax.random.bits(rng.fold(key, "units", i), (n,), jnp.uint32)
    return [draw(i, n) for i, n in enumerate(hidden)]


def highest(draws: jax.Array, count: int, scores: jax.Array | None = None) -> jax.Array:
    """Ascending: the `count` units of highest score, among equals of the largest draws."""
    order = jnp.argsort(draws) if scores is None else jnp.lexsort((draws, scores))
    return jnp.sort(order[draws.shape[0] - count :]).astype(jnp.int32)


def submodels(
    algorithm: Algorithm,
    task: Task,
    tiers: Sequence[float],
    *,
    units: str = "random",
    assignment: str = "drawn",
    coverage: bool = False,
    down: Codec | None = None,
) -> Algorithm:
    """`algorithm` with clients that have the shares `tiers` of every hidden layer's units.

    Each message is cut for its client, then encoded by `down`. Uploads are encoded by `algorithm`
    itself, `compressed(..., up=codec)`.
    """
    structure = task.units()
    _check(algorithm, task, structure, tiers, units, assignment, down)
    assert structure
    scored = units == "adaptive"
    widths = [tuple(kept_count(n, d, units) for n in structure.hidden) for d in tiers]
    kinds = [_Tier(structure, w, units) for w in widths]

    def init(variables, num_clients):
        server, client = algorithm.init(variables, num_clients)
        if scored:
            zeros = lambda dtype: tuple(jnp.zeros(n, dtype) for n in structure.hidden)
            nothing = jnp.float32(-jnp.inf)  # no loss is lower: a first visit improves on nothing
            client = Scored(client, zeros(jnp.float32), zeros(bool), jnp.bool_(False), nothing)
        return server, client

    exchanges = tuple(
        _cut(part, kinds, assignment, coverage, down) for part in algorithm.exchanges
    )
    return algorithm._replace(init=init, exchanges=exchanges)


def _cut(
    part: Exchange, kinds: list[_Tier], assignment: str, coverage: bool, down: Codec | None
) -> Exchange:
    structure, scored = kinds[0].structure, kinds[0].units == "adaptive"

    def of_tier(tier: _Tier):
        def work(message, state, data, round, key):
            kept = tier.kept(state, key)
            received = units_lib.extract(structure, message, kept)
            if down:
                received, _ = through(down, received, (), rng.fold(key, "codec down"))
            inner = state.inner if scored else state
            reply = part.local(received, inner, data, round, key)
            whole = lambda tree: units_lib.remap(structure, tree, kept)
            return reply._replace(
                info=reply.info._replace(model=whole(reply.info.model)), mean=whole(reply.mean),
                sum=whole(reply.sum), each=whole(reply.each),
            ), units_lib.masks(structure, kept)

        return work

    def local(message, state, data, round, key):
        tier = tier_of(key, data.client, len(kinds), assignment)
        inputs = (message, state, data, round, key)
        branches = [of_tier(kind) for kind in kinds]
        if len(branches) == 1:
            reply, kept = branches[0](*inputs)
        else:
            reply, kept = jax.lax.switch(tier, branches, *inputs)
        if scored:
            reply = reply._replace(state=_rated(state, reply, kept))
        if coverage:
            reply = reply._replace(each=Covered(reply.each, kept))
        return reply._replace(kind=tier)

    def update(server, uploads, round):
        if coverage:
            each, kept = uploads.each
            total = jnp.sum(uploads.weights)
            weights = uploads.weights / jnp.where(total > 0, total, 1)
            share = units_lib.coverage(structure, uploads.mean, kept, weights)
            mean = jax.tree.map(lambda x, s: x / jnp.where(s > 0, s, 1), uploads.mean, share)
            uploads = uploads._replace(mean=mean, each=each)
        return part.update(server, uploads, round)

    def weighs(tier: _Tier):
        narrow = lambda shapes: units_lib.narrowed(structure, shapes, tier.widths)
        weigh = (down.bits if down else bits_of), (part.bits[0][1] or bits_of)
        return tuple(lambda shapes, f=f: f(narrow(shapes)) for f in weigh)

    address = part.address
    inner = lambda state: state.inner if scored else state
    return part._replace(
        local=local,
        update=update,
        address=address and (lambda common, state, client: address(common, inner(state), client)),
        bits=tuple(weighs(kind) for kind in kinds),
    )


def _rated(state: Scored, reply: Reply, kept: tuple[jax.Array, ...]) -> Scored:
    """Scores after a visit: the units that were trained gain what the loss fell by."""
    sums = reply.info.sums
    loss = sums["loss"] / jnp.maximum(sums["units"], 1)
    better = loss < state.loss
    gain = jnp.where(better, (state.loss - loss) / state.loss, 0.0)
    scores = tuple(s + gain * k.astype(s.dtype) for s, k in zip(state.scores, kept, strict=True))
    return Scored(reply.state, scores, kept, better, loss)


def _check(algorithm, task, structure, tiers, units, assignment, down) -> None:
    errors.lookup("submodel.units", units, dict.fromkeys(CHOICES))
    errors.lookup("submodel.assignment", assignment, dict.fromkeys(ASSIGNMENTS))
    for d in tiers:
        if isinstance(d, bool) or not isinstance(d, int | float) or not 0 < d <= 1:
            raise errors.UsageError(
                f"submodel.tiers = {tuple(tiers)}: expected shares of units, each more than 0 and "
                "at most 1, e.g. 0.8,0.75,0.7."
            )
    if units == "adaptive" and len(tiers) > 1 and assignment != "fixed":
        raise errors.UsageError(
            f"submodel.units = adaptive with {len(tiers)} tiers: a client trains the same units "
            "again while its loss falls, so it needs a tier of its own. Add "
            "submodel.assignment=fixed, or leave one tier."
        )
    if structure is None:
        raise errors.UsageError(
            "submodel.tiers: this network is no chain of hidden layers whose widths can be chosen. "
            "Those of mlp, lenet, cnn and femnist_cnn can, and those of any flax module with a "
            "field `hidden`, the widths."
        )
    variables = jax.eval_shape(lambda: task.init(jax.random.key(0)))
    zero = jax.ShapeDtypeStruct((), jnp.int32)
    server, client = jax.eval_shape(lambda v: algorithm.init(v, 1), variables)
    if algorithm.personal or jax.tree.leaves(client):
        raise errors.UsageError(
            "submodel.tiers: clients of this method keep something of the model between rounds, "
            "and a sub-model has other units every time. Choose a method without client state, "
            "e.g. fedavg, fedprox, fedavgm, fedadam, fedntd, with averaged statistics and a codec "
            "that keeps no residual."
        )
    for part in algorithm.exchanges:
        message = jax.eval_shape(part.broadcast, server, zero)
        units_lib.check(structure, message)
        if down and jax.tree.leaves(jax.eval_shape(down.init, message)):
            raise errors.UsageError(
                "wire.down: this codec keeps what it left out of the last message, and every "
                "sub-model is another message. Choose one that keeps nothing, e.g. 8bit."
            )
