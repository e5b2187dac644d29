"""What a client computes: local training, and sums over all its examples.

The local loop is epochs over shuffled examples, one optimiser step per batch; where the task says
so, batches are mined (mining.py). The gradient of the
task's loss and a method's terms passes through sharpness, then drift, then the optimiser: one optax
chain with extra arguments. Statistics move once per step, with the pass at w.

A client of size n takes ceil(n / B) steps per epoch, the last one on a smaller batch, and not one
step more: the trip counts are the client's own. Under `vmap` the loop runs as long as the longest
client's and a finished client's carry is left alone, so padding changes no bit.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_flat import debug, errors, parts, rng
from fedjax_flat.client.mining import anchors_of, miner
from fedjax_flat.client.terms import Term
from fedjax_flat.data import federated
from fedjax_flat.data.federated import ClientData, client_batch, shuffled_positions
from fedjax_flat.models import Variables
from fedjax_flat.tasks import Sums, Task


class LocalInfo(NamedTuple):
    """What happened on one client."""

    sums: Sums  # over every example visited, at the parameters before each step
    drift: jax.Array  # mean over local epochs of ||w - anchor||
    steps: jax.Array
    model: Any  # where training ended, own part and all; () if nothing was trained
    measured: dict[str, Any]  # what additions found while training, by name


class LocalResult(NamedTuple):
    """Where local training ended; in the client's own part, what it received."""

    variables: Variables
    info: LocalInfo
    sharpness_state: Any  # of the sharpness transform, for methods whose ascent has a memory


class Stepper(NamedTuple):
    """Steps that a method takes in place of the gradient's, on the loop's batches.

    `init(params)` is what they carry on beside the model. `take` makes (variables, states, sums) of
    (variables, states, stored batch, key) and the keywords client and step.
    """

    init: Callable[[Any], Any]
    take: Callable[..., tuple[Variables, Any, Sums]]


class Client(NamedTuple):
    """`train(variables, data, key, *, round, terms, drift, sharpness, frozen, stepper)`.

    It returns a LocalResult. `over(f, data)` is the sum of f(batch) over all the client's stored
    examples, `steps(data)` the number of local steps it takes, `on(task)` the same client with
    another task. What is `frozen` is so in all training. A `stepper` goes without terms, drift,
    sharpness and frozen parts; who makes one reads `optimizer` and `batch_size`.
    """

    task: Task
    train: Callable[..., LocalResult]
    over: Callable[[Callable[..., Any], ClientData], Any]
    steps: Callable[[ClientData], jax.Array]
    on: Callable[[Task], "Client"]
    optimizer: optax.GradientTransformation
    batch_size: int
    frozen: parts.Part | None = None


class _Pass(NamedTuple):
    """What a client's steps carry on, and what a group hands from one client to the next."""

    variables: Variables
    states: Any  # of sharpness, drift and optimiser
    sums: Sums
    drift: jax.Array
    steps: jax.Array


def local_training(
    task: Task,
    optimizer: optax.GradientTransformation,
    *,
    sharpness: optax.GradientTransformation | None = None,
    batch_size: int,
    epochs: int = 1,
    steps: int | None = None,
    frozen: parts.Part | None = None,
    drop_last: bool = False,
) -> Client:
    """A client that trains with `optimizer` on the gradient that `sharpness` makes.

    `steps`, when given, replaces `epochs` by a number of steps, over as many reshuffled epochs as
    they need. Everything starts fresh in every round. The transforms are called with the extra
    arguments `grad_fn` (the gradient of this batch, same examples and key, elsewhere), `anchor` and
    `round`. Of a group, each client goes on with the model of the one before it. What is `frozen`
    stays as it was received. With `drop_last` an epoch ends before a batch that would not be full,
    unless it is the only one.
    """
    for name, count in (("batch_size", batch_size), ("epochs", epochs), ("steps", steps)):
        if count is not None:
            errors.at_least(name, count, 1)
    if task.mining:
        anchors_of(batch_size, task.mining.negatives)
    own_sharpness, own_frozen = sharpness, frozen
    batches = functools.partial(_batches, batch_size=batch_size, drop_last=drop_last)

    def train(
        variables: Variables,
        data: ClientData,
        key: jax.Array,
        *,
        round: Any,
        terms: Sequence[Term] = (),
        drift: optax.GradientTransformation | None = None,
        sharpness: optax.GradientTransformation | None = None,
        frozen: parts.Part | None = None,
        stepper: Stepper | None = None,
    ) -> LocalResult:
        sharpness = sharpness or own_sharpness
        frozen = parts.either(own_frozen, frozen)
        if stepper and (terms or drift or sharpness or frozen or data.group is not None):
            raise errors.UsageError(
                "a method with local steps of its own, and terms, drift, sharpness, frozen parts "
                "or clients in groups, of which its steps know nothing. Leave those out."
            )
        transforms = (sharpness, drift, optimizer)
        chain = optax.chain(*(optax.identity() if t is None else t for t in transforms))
        _check_frozen(variables, frozen)
        anchor = parts.put(variables, data.own)
        visit = functools.partial(
            _visit, _Step(task, chain, anchor.params, terms, frozen, round, stepper),
            batches=batches, batch_size=batch_size, epochs=epochs, steps=steps,
        )
        zero = jnp.zeros((), jnp.float32)
        states = (stepper or chain).init(anchor.params)
        start = _Pass(anchor, states, _no_sums(task, anchor, data, batch_size), zero,
                      jnp.zeros((), jnp.int32))
        if data.group is None:
            end = visit(start, data, key)
        else:
            end = _in_sequence(visit, chain, start, data, key)
        info = LocalInfo(end.sums, end.drift, end.steps, end.variables, {})
        shared = parts.put(end.variables, parts.take(variables, lambda name: name in data.own))
        return LocalResult(shared, info, () if stepper else end.states[0])

    def steps_of(data):
        if data.group is None:
            total, _ = _schedule(data.size, batches(data.size), epochs, steps)
            return jnp.asarray(total, jnp.float32)
        sizes = data.group.sizes
        total, _ = _schedule(sizes, batches(sizes), epochs, steps)
        return jnp.sum(total).astype(jnp.float32) * data.passes

    over = functools.partial(federated.over, batch_size=batch_size)
    on = functools.partial(
        local_training, optimizer=optimizer, sharpness=sharpness, batch_size=batch_size,
        epochs=epochs, steps=steps, frozen=frozen, drop_last=drop_last,
    )
    return Client(task, train, over, steps_of, on, optimizer, batch_size, frozen)


def _check_frozen(variables: Variables, frozen: parts.Part | None) -> None:
    names = list(parts.take(variables, lambda name: True))
    still = [name for name in names if frozen and frozen(name)]
    if frozen and not still:
        raise errors.UsageError(
            f"a frozen part that is empty: the predicate holds for none of {', '.join(names)}."
        )
    if all(name in still for name in names if name.startswith("params/")):
        raise errors.UsageError(
            f"a frozen part that leaves nothing to train: it has all of {', '.join(still)}."
        )


class _Step(NamedTuple):
    """One local step, all but the state it changes."""

    task: Task
    chain: optax.GradientTransformationExtraArgs
    anchor: Any
    terms: Sequence[Term]
    frozen: parts.Part | None
    round: Any
    stepper: Stepper | None

    def loss(self, params, stats, batch, contexts, key):
        """(mean loss over the real units plus the terms, (sums, statistics))."""
        outputs = self.task.forward(Variables(params, stats), batch, key)
        sums = self.task.measure(outputs, batch)
        loss = sums["loss"] / jnp.maximum(sums["units"], 1)
        for term, context in zip(self.terms, contexts, strict=True):
            loss = loss + term.loss(outputs, batch, context)
        return loss, (sums, outputs.stats)

    def take(self, variables, states, stored, key, **where):
        """(variables, states, sums) after one batch of stored examples."""
        if self.stepper:
            return self.stepper.take(variables, states, stored, key, **where)
        params, stats = variables
        batch = self.task.prepare(stored, rng.fold(key, "augment"))
        contexts = [jax.lax.stop_gradient(term.context(batch)) for term in self.terms]
        gradient = jax.value_and_grad(self.loss, has_aux=True)

        def at(params):
            rest = (stats, batch, contexts, rng.fold(key, "loss"))
            (_, seen), grads = gradient(params, *rest)
            return seen, self.still(grads)

        (sums, moved), grads = at(params)
        if self.frozen:
            kept = parts.take(Variables((), stats), self.frozen)
            moved = parts.put(Variables((), moved), kept).stats
        stats = moved
        debug.check({"loss": sums["loss"], "gradient": grads}, **where)
        updates, states = self.chain.update(
            grads, states, params, grad_fn=lambda p: at(p)[1], anchor=self.anchor, round=self.round
        )
        params = optax.apply_updates(params, self.still(updates))
        debug.check({"params": params}, **where)
        return Variables(params, stats), states, sums

    def still(self, tree):
        """Nothing where the model is frozen."""
        return parts.without(Variables(tree), self.frozen).params


def _visit(
    step: _Step, begin: _Pass, data: ClientData, key, *, batches, batch_size, epochs, steps
) -> _Pass:
    """One client's steps."""
    steps_per_epoch = batches(data.size)
    total, num_epochs = _schedule(data.size, steps_per_epoch, epochs, steps)
    length = -(-data.max_size // batch_size) * batch_size
    own = miner(step.task, data, begin.variables, batch_size)

    def one(i, carry, positions, first):
        variables, states, sums, cache = carry
        cache = own.refreshed(cache, variables, i)
        here = own.batch(cache, positions, i - first)
        variables, states, new = step.take(
            variables, states, client_batch(data, here), rng.fold(key, "step", i),
            client=data.client, step=i,
        )
        return variables, states, optax.tree.add(sums, new), cache

    def epoch(e, carry):
        inner, drift = carry
        positions = shuffled_positions(rng.fold(key, "shuffle", e), data.size, length)
        positions = own.anchors(positions)
        first = e * steps_per_epoch
        here = steps_per_epoch if steps is None else jnp.minimum(steps_per_epoch, total - first)
        inner = jax.lax.fori_loop(0, here, lambda i, c: one(first + i, c, positions, first), inner)
        return inner, drift + tree_distance(inner[0].params, step.anchor)

    start = (begin.variables, begin.states, begin.sums, own.empty()), begin.drift
    (variables, states, sums, _), distance = jax.lax.fori_loop(0, num_epochs, epoch, start)
    distance = distance / jnp.maximum(num_epochs, 1).astype(jnp.float32)
    return _Pass(variables, states, sums, distance, begin.steps + jnp.asarray(total, jnp.int32))


def _batches(size: Any, *, batch_size: int, drop_last: bool) -> Any:
    """How many batches an epoch over `size` examples has."""
    every = -(-size // batch_size)
    if not drop_last:
        return every
    least = min if isinstance(size, int) else jnp.minimum
    most = max if isinstance(size, int) else jnp.maximum
    return most(size // batch_size, least(every, 1))


def _schedule(
    size: Any, steps_per_epoch: Any, epochs: int, steps: int | None
) -> tuple[Any, Any]:
    """(local steps, epochs that they need) of a client of this size."""
    if steps is None:
        return epochs * steps_per_epoch, epochs
    if isinstance(size, int):
        return steps, -(-steps // steps_per_epoch)
    total = jnp.where(size > 0, steps, 0)
    return total, -(-total // jnp.maximum(steps_per_epoch, 1))


def _in_sequence(visit, chain, start: _Pass, data: ClientData, key) -> _Pass:
    """A group's clients, each with a fresh optimiser; the drift is the last one's.

    The anchor of them all is what the group received, and a client's key is its own, by itself or
    in whatever group: groups of one are the clients, bit for bit.
    """
    group = data.group
    assert group is not None
    base = key if group.key is None else group.key

    def one(i, carry):
        # What sharpness remembers goes on; drift and optimiser begin anew.
        fresh = (carry.states[0], *chain.init(start.variables.params)[1:])
        begin = carry._replace(states=fresh, drift=jnp.zeros_like(carry.drift))
        turn, place = i // jnp.maximum(group.length, 1), i % jnp.maximum(group.length, 1)
        member = data.member(place)
        own = rng.fold(base, member.client)
        if data.passes > 1:
            again = jax.random.key_data(rng.fold(own, "pass", turn))
            own = jax.random.wrap_key_data(
                jnp.where(turn > 0, again, jax.random.key_data(own))
            )
        end = visit(begin, member, own)
        return jax.tree.map(lambda new, old: jnp.where(member.size > 0, new, old), end, carry)

    return jax.lax.fori_loop(0, data.passes * group.length, one, start)


def _no_sums(task: Task, variables: Variables, data: ClientData, batch_size: int) -> Sums:
    """Zeros in the shapes of the task's sums."""

    def sums(data):
        return task.evaluate(variables, client_batch(data, jnp.arange(batch_size)))

    client = data if data.group is None else data.member(0)
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(sums, client))


def full_gradient(client: Client, variables: Variables, data: ClientData) -> tuple[Any, LocalInfo]:
    """(gradient of the mean loss over all a client's examples as they are, what was seen).

    In the client's own part of the model there is none: it is no business of the server's. Nor is
    there in what is frozen.
    """
    variables = parts.put(variables, data.own)

    def of_batch(stored):
        batch = client.task.prepare(stored, None)

        def loss(params):
            sums = client.task.measure(
                client.task.forward(Variables(params, variables.stats), batch, None), batch
            )
            return sums["loss"], sums

        return jax.grad(loss, has_aux=True)(variables.params)

    total, sums = client.over(of_batch, data)
    gradient = jax.tree.map(lambda g: g / jnp.maximum(sums["units"], 1).astype(g.dtype), total)
    still = parts.either(lambda name: name in data.own, client.frozen)
    gradient = parts.without(Variables(gradient), still).params
    zero = jnp.zeros((), jnp.float32)
    return gradient, LocalInfo(sums, zero, jnp.zeros((), jnp.int32), (), {})


def tree_distance(a: Any, b: Any) -> jax.Array:
    """||a - b|| over all leaves."""
    return optax.tree.norm(optax.tree.sub(a, b))
