"""FedFA: features of a batch are given other means and deviations, as clients have among them.

Zhou and Konukoglu, "FedFA: federated feature augmentation" (ICLR 2023). At the end of every block
of a network whose value is an image x of C channels, in training and with a probability, with mu
and sd the mean and sqrt(variance + eps) over the image, of each example and channel:

    running    m <- a m + (1 - a) mean over the batch of mu,   s likewise of sd      (uploaded)
    server     G_m, G_s = variance of m and of s over the cohort, of each channel    (sent)
    client     g = C r / (sum of r over channels),   r = 1 / (1 + 1 / (G + eps))
               v = (1 + g) (variance over the batch of mu + eps), with G_m, and of sd with G_s
               beta ~ N(mu, v_m), gamma ~ N(sd, v_s),   x <- gamma (x - mu) / sd + beta

Variances divide by the count, as in the paper's equations (the released code: by one less); padding
counts in none. The first round has G = 1, and m = 0, s = 1 start anew in every round: clients keep
nothing. In a step that leaves a block as it is, its m and s stay too, as in the released code. The
released server has one variance of all values of a layer in the place of one for each channel:
`pooled`; since g only compares channels, it is then 1, whatever clients measure. Networks are
evaluated, aggregated and kept as they are: nothing of this is in the model. With probability 0 it
is FedAvg.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat import errors, rng
from fedjax_flat.algorithms.addition import Addition, Beside, beside, shapes_of
from fedjax_flat.algorithms.method import Method
from fedjax_flat.client import Client
from fedjax_flat.models import Variables
from fedjax_flat.settings import Setting
from fedjax_flat.tasks import Task

EPSILON = 1e-6
NAME = "fedfa"


class Spread(NamedTuple):
    """Of the mean and of the deviation, one value per channel: running, or over clients."""

    mean: Any
    deviation: Any


def fedfa(
    *, probability: float = 0.5, momentum: float = 0.99, pooled: bool = False
) -> Addition:
    """Feature augmentation at the ends of blocks that are images."""
    errors.below_one("momentum", momentum)
    if not 0 <= probability <= 1:
        raise errors.UsageError(f"probability = {probability}: expected 0 to 1.")

    def change(client: Client) -> Client:
        def train(variables, data, key, **rest):
            spreads = data.brought[NAME]
            begin = tuple(Spread(jnp.zeros_like(g.mean), jnp.ones_like(g.mean)) for g in spreads)
            task = augmented(client.task, spreads, probability, momentum)
            start = variables._replace(stats={**dict(variables.stats or {}), NAME: begin})
            result = client.on(task).train(start, data, key, **rest)
            info = result.info
            measured = {**info.measured, NAME: info.model.stats[NAME]}
            info = info._replace(model=_plain(info.model), measured=measured)
            return result._replace(variables=_plain(result.variables), info=info)

        return client._replace(train=train, on=lambda task: change(client.on(task)))

    def around(algorithm, task):
        def start(variables):
            ends = shapes_of(task, variables).blocks
            channels = [x.shape[-1] for x in ends if _is_image(x)]
            if not channels:
                raise errors.UsageError(
                    "fedfa with a network that has no images at the ends of its blocks: expected "
                    "one with convolutions, such as cnn, lenet, femnist_cnn, resnet18, resnet20."
                )
            return tuple(Spread(jnp.ones(c), jnp.ones(c)) for c in channels)

        what = Beside(
            server=start,
            upload=lambda info: info.measured[NAME],
            learn=lambda kept, model, each, present: over_clients(each, present, pooled),
        )
        return beside(algorithm, NAME, what)

    return Addition(change, around, innermost=True)


def augmented(
    task: Task, spreads: tuple[Spread, ...], probability: float, momentum: float
) -> Task:
    """The task whose network changes features while it trains; `stats` carry what is running."""

    def forward(variables, batch, key, at_blocks=None):
        if key is None:
            return task.forward(_plain(variables), batch, key, at_blocks)
        running = list(variables.stats[NAME])
        layers = iter(range(len(running)))

        def change(i, x):
            if _is_image(x) and probability:  # 0 leaves no trace, not even of rounding
                layer = next(layers)
                here = rng.fold(key, NAME, layer)
                x, running[layer] = augment(
                    here, x, batch.mask, running[layer], spreads[layer], probability, momentum
                )
            return at_blocks(i, x) if at_blocks else x

        outputs = task.forward(_plain(variables), batch, key, change)
        return outputs._replace(stats={**dict(outputs.stats or {}), NAME: tuple(running)})

    return task._replace(forward=forward)


def augment(
    key: jax.Array, x: jax.Array, mask: jax.Array, running: Spread, spread: Spread,
    probability: float, momentum: float,
) -> tuple[jax.Array, Spread]:
    """(features with other means and deviations, or as they are; running means of both)."""
    images = x.astype(jnp.float32)
    mu = jnp.mean(images, axis=(1, 2), keepdims=True)
    sd = jnp.sqrt(jnp.var(images, axis=(1, 2), keepdims=True) + EPSILON)
    real = mask.reshape(-1, 1, 1, 1)
    count = jnp.maximum(jnp.sum(mask.astype(jnp.float32)), 1)
    mean = lambda v: jnp.sum(jnp.where(real, v, 0.0), axis=0, keepdims=True) / count

    def drawn(purpose, v, g):
        """v + noise of (1 + g) (its variance over the batch), one draw per example and channel."""
        variance = mean(jnp.square(v - mean(v))) + EPSILON
        keys = rng.fold_each(rng.fold(key, purpose), v.shape[0])
        noise = jax.vmap(lambda k: jax.random.normal(k, v.shape[1:]))(keys)
        return v + jnp.sqrt((1 + weight(g)).reshape(1, 1, 1, -1) * variance) * noise

    beta, gamma = drawn("mean", mu, spread.mean), drawn("deviation", sd, spread.deviation)
    changed = (gamma * (images - mu) / sd + beta).astype(x.dtype)
    now = jax.random.uniform(rng.fold(key, "whether")) < probability
    rate = jnp.where(now & jnp.any(mask), 1 - momentum, 0.0)
    move = lambda old, v: old + rate * (jax.lax.stop_gradient(mean(v)).reshape(-1) - old)
    moved = Spread(move(running.mean, mu), move(running.deviation, sd))
    return jnp.where(now, changed, x), moved


def weight(spread: jax.Array) -> jax.Array:
    """g: how much each channel varies over clients, 1 on average."""
    r = 1 / (1 + 1 / (spread + EPSILON))
    return r.shape[0] * r / jnp.sum(r)


def over_clients(each: Any, present: jax.Array, pooled: bool) -> Any:
    """The variance over the clients that took part, of each channel or of a whole layer."""

    def variance(values):
        real = present.reshape(-1, 1)
        axis = None if pooled else 0
        count = jnp.maximum(jnp.sum(present.astype(jnp.float32)), 1)
        count = count * values.shape[1] if pooled else count
        mean = lambda v: jnp.sum(jnp.where(real, v, 0.0), axis=axis, keepdims=True) / count
        found = mean(jnp.square(values - mean(values)))
        return jnp.broadcast_to(found, (1, values.shape[1])).reshape(-1)

    return jax.tree.map(variance, each)


def _is_image(x: Any) -> bool:
    return len(x.shape) == 4


def _plain(variables: Variables) -> Variables:
    """The model without what is running."""
    if NAME not in (variables.stats or ()):
        return variables
    return variables._replace(
        stats={n: v for n, v in variables.stats.items() if n != NAME} or ()
    )


METHOD = Method(
    "fedfa", "Zhou 2023", "features vary as they do over clients",
    add=lambda settings: fedfa(**settings),
    settings={
        "probability": Setting(0.5, "of changing a block in a step", at_least=0, at_most=1),
        "momentum": Setting(0.99, "of the running statistics", at_least=0, below=1),
        "pooled": Setting(False, "one variance per layer, as in the released code"),
    },
)
