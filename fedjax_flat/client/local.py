"""What a client computes: local training, and the gradient over all its examples.

The local loop is epochs over shuffled examples, one optimiser step per batch. The gradient passes
through sharpness, then drift, then the optimiser: one optax chain with extra arguments.

A client of size n takes ceil(n / B) steps per epoch, the last one on a smaller batch, and not one
step more: the trip counts are the client's own. Under `vmap` the loop runs as long as the longest
client's and a finished client's carry is left alone, so padding changes no bit.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_flat import debug, rng
from fedjax_flat.data.federated import ClientData, client_batch, shuffled_positions
from fedjax_flat.objective import Objective, Totals


class LocalInfo(NamedTuple):
    """What happened on one client."""

    totals: Totals  # over every example visited, at the parameters before each step
    drift: jax.Array  # mean over local epochs of ||w - anchor||, equation (3.8)
    steps: jax.Array
    model: Any  # where training ended, for those who look; () if there was none


class LocalResult(NamedTuple):
    """Where local training ended."""

    params: Any
    info: LocalInfo
    sharpness_state: Any  # of the sharpness transform, for methods whose ascent has a memory


class Client(NamedTuple):
    """`train(params, data, key, *, round, drift, sharpness) -> LocalResult`.

    `gradient(params, data)`: of the mean loss over all the client's examples, not augmented.
    """

    train: Callable[..., LocalResult]
    gradient: Callable[[Any, ClientData], Any]


def local_training(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    *,
    sharpness: optax.GradientTransformation | None = None,
    batch_size: int,
    epochs: int = 1,
    steps: int | None = None,
) -> Client:
    """A client that trains with `optimizer` on the gradient that `sharpness` makes.

    `steps`, when given, replaces `epochs` by a number of steps, over as many reshuffled epochs as
    they need. Everything starts fresh in every round. The transforms are called with the extra
    arguments `grad_fn` (the gradient of this batch, same examples and key, elsewhere), `anchor` and
    `round`.
    """
    own_sharpness = sharpness
    grad = jax.value_and_grad(objective.mean_loss, has_aux=True)

    def train(
        params, data: ClientData, key: jax.Array, *, round, drift=None, sharpness=None
    ) -> LocalResult:
        parts = (sharpness or own_sharpness, drift, optimizer)
        chain = optax.chain(*(optax.identity() if p is None else p for p in parts))
        anchor = params
        steps_per_epoch = -(-data.size // batch_size)
        total: Any
        if steps is None:
            total, num_epochs = epochs * steps_per_epoch, epochs
        elif isinstance(data.size, int):
            total, num_epochs = steps, -(-steps // steps_per_epoch)
        else:
            total = jnp.where(data.size > 0, steps, 0)
            num_epochs = -(-total // jnp.maximum(steps_per_epoch, 1))
        length = -(-data.max_size // batch_size) * batch_size

        def step(i, carry, positions, first):
            params, opt_state, totals = carry
            here = jax.lax.dynamic_slice(positions, ((i - first) * batch_size,), (batch_size,))
            step_key = rng.fold(key, "step", i)
            batch = objective.augment(client_batch(data, here), rng.fold(step_key, "augment"))
            loss_key = rng.fold(step_key, "loss")
            (_, batch_totals), grads = grad(params, batch, loss_key)
            debug.check({"loss": batch_totals.loss, "gradient": grads}, client=data.client, step=i)
            updates, opt_state = chain.update(
                grads,
                opt_state,
                params,
                grad_fn=lambda p: grad(p, batch, loss_key)[1],
                anchor=anchor,
                round=round,
            )
            params = optax.apply_updates(params, updates)
            debug.check({"params": params}, client=data.client, step=i)
            return params, opt_state, totals + batch_totals

        def epoch(e, carry):
            inner, drift = carry
            positions = shuffled_positions(rng.fold(key, "shuffle", e), data.size, length)
            first = e * steps_per_epoch
            here = steps_per_epoch if steps is None else jnp.minimum(steps_per_epoch, total - first)
            inner = jax.lax.fori_loop(
                0, here, lambda i, c: step(first + i, c, positions, first), inner
            )
            return inner, drift + tree_distance(inner[0], anchor)

        start = (params, chain.init(params), Totals.zero()), jnp.zeros((), jnp.float32)
        (params, states, totals), distance = jax.lax.fori_loop(0, num_epochs, epoch, start)
        distance = distance / jnp.maximum(num_epochs, 1).astype(jnp.float32)
        info = LocalInfo(totals, distance, jnp.asarray(total, jnp.int32), params)
        return LocalResult(params, info, states[0])

    def gradient(params, data: ClientData):
        def add(i, total):
            stored = client_batch(data, i * batch_size + jnp.arange(batch_size))
            batch = objective.normalise(stored)
            part = jax.grad(lambda p: objective.totals(p, batch).loss)(params)
            return jax.tree.map(jnp.add, total, part)

        zero = jax.tree.map(jnp.zeros_like, params)
        total = jax.lax.fori_loop(0, -(-data.size // batch_size), add, zero)
        n = jnp.maximum(jnp.asarray(data.size), 1)
        return jax.tree.map(lambda g: g / n.astype(g.dtype), total)

    return Client(train, gradient)


def no_training() -> LocalInfo:
    """Of a client that only measured."""
    return LocalInfo(Totals.zero(), jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32), ())


def tree_distance(a: Any, b: Any) -> jax.Array:
    """||a - b|| over all leaves."""
    return optax.tree.norm(jax.tree.map(jnp.subtract, a, b))
