"""Any algorithm with client-level differential privacy: clipped uploads, and noise on their sum.

Geyer et al., "Differentially private federated learning: a client level perspective" (2017);
McMahan et al., "Learning differentially private recurrent language models" (ICLR 2018).

    Delta = (sum_k Delta_k / max(1, ||Delta_k|| / S) + N(0, (z S)^2 I)) / m

S is given, or the median of the round's ||Delta_k|| (Geyer), which noise does not protect. z is the
noise multiplier. Clients weigh the same. m is the number of clients that took part; where each
takes part on its own with probability q (`bernoulli`), it is the expected one, q K (McMahan et
al.'s first estimator), as the number itself is private. All that is uploaded counts in the norm,
statistics too; what is encoded is clipped as the server decodes it.

(epsilon, delta) after T rounds is the Renyi accountant's of the package dp-accounting, for one
client more or less under Poisson sampling; for cohorts of a fixed size, drawn without replacement,
for one client exchanged for another, whose sum moves by up to 2 S.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_flat import errors, rng
from fedjax_flat.algorithms.base import Algorithm, Exchange
from fedjax_flat.algorithms.robust import only_mean
from fedjax_flat.server.robust import trimmed_mean

BOUNDS = ("none", "fixed", "median")


def private(
    algorithm: Algorithm,
    *,
    clip: float | None,
    noise: float,
    seed: int = 0,
    expected: float | None = None,
) -> Algorithm:
    """`algorithm` with uploads clipped to `clip`, None is the median, and `noise` times that added.

    `expected`, when given, is the number of clients by which the sum is divided.
    """
    errors.at_least("privacy.noise", noise, 0)
    if clip is not None:
        errors.positive("privacy.clip", clip)
    if expected is not None:
        errors.positive("the expected number of clients", expected)

    if len(algorithm.exchanges) > 1:
        raise errors.UsageError(
            "privacy with a method of two exchanges per round: what a client sends would be given "
            "away twice, and counted once. Choose a method with one, e.g. fedavg."
        )

    def guarded(i: int, part: Exchange) -> Exchange:
        def local(*arguments):
            reply = only_mean(part.local(*arguments), "privacy.bound")
            reply = reply._replace(weight=jnp.float32(1))
            if clip is None:  # the server clips, once it knows all norms
                return reply._replace(mean=(), each=reply.mean)
            return reply._replace(mean=clipped(reply.mean, clip))

        def update(server, uploads, round):
            clients, metrics = uploads.clients, {}
            if clip is None:
                norms = jax.vmap(optax.tree.norm)(uploads.each)
                bound = trimmed_mean(norms, uploads.weights > 0, None)
                each = jax.vmap(clipped, (0, None))(uploads.each, bound)
                total = jax.tree.map(lambda x: jnp.sum(x, axis=0), each)
                metrics["privacy_clip"] = bound
            else:
                bound = jnp.float32(clip)
                total = optax.tree.scale(clients, uploads.mean)
            draws = normals(rng.fold(jax.random.key(seed), "privacy", i, round), total)
            sum_ = optax.tree.add_scale(total, noise * bound, draws)
            by = jnp.maximum(clients, 1) if expected is None else jnp.float32(expected)
            mean = optax.tree.scale(1 / by, sum_)
            server, own = part.update(server, uploads._replace(mean=mean, each=()), round)
            return server, {**own, **metrics}

        return part._replace(local=local, update=update)

    return algorithm._replace(
        exchanges=tuple(guarded(i, part) for i, part in enumerate(algorithm.exchanges))
    )


def clipped(tree: Any, bound: Any) -> Any:
    """tree / max(1, ||tree|| / bound); a bound of 0 gives 0."""
    length = optax.tree.norm(tree)
    scale = jnp.where(length > bound, bound / jnp.where(length > 0, length, 1), 1.0)
    return optax.tree.scale(scale, tree)


def normals(key: jax.Array, tree: Any) -> Any:
    """Standard normal numbers in the shapes of a tree."""
    leaves, structure = jax.tree.flatten(tree)
    draw = lambda i, x: jax.random.normal(rng.fold(key, i), x.shape, x.dtype)
    return jax.tree.unflatten(structure, [draw(i, x) for i, x in enumerate(leaves)])


def epsilon(
    *, noise: float, clients: int, cohort: int, rounds: int, delta: float, sampling: str
) -> float:
    """Of (epsilon, delta)-privacy after so many rounds with cohorts of `clients` clients."""
    try:
        import dp_accounting as dp
        from dp_accounting import rdp
    except ImportError as e:
        raise errors.UsageError(
            "privacy.delta needs the package dp-accounting: pip install 'fedjax-flat[privacy]'. It "
            "asks for attrs < 24, so not with -c constraints.txt."
        ) from e
    if noise == 0:
        return math.inf
    relations = dp.NeighboringRelation
    if sampling == "bernoulli":
        accountant = rdp.RdpAccountant(neighboring_relation=relations.ADD_OR_REMOVE_ONE)
        event = dp.PoissonSampledDpEvent(cohort / clients, dp.GaussianDpEvent(noise))
    else:
        accountant = rdp.RdpAccountant(neighboring_relation=relations.REPLACE_ONE)
        # One client for another moves the sum by up to two clips.
        gaussian = dp.GaussianDpEvent(noise / 2)
        event = dp.SampledWithoutReplacementDpEvent(clients, cohort, gaussian)
    accountant.compose(dp.SelfComposedDpEvent(event, rounds))
    return float(accountant.get_epsilon(delta))
