"""Classifiers that are solved for, not trained: a closed form of sums over all clients' examples.

The features phi of a frozen network are what its classifier reads. A client measures them once, in
evaluation mode; the server adds up and solves. Which client holds an example does not matter, nor
the order in which clients come: the sums, and so the classifier, are those of the union.

    client k    s_k = sum over its examples of measure(phi(x), one-hot y)
    server      s <- s + sum over the cohort of s_k,     classifier <- solve(s)

A client counts once: one that is drawn again sends nothing. Whatever is down is free, because the
network is there already; what is up is `bits` of the sums.

Sums are float32 within a cohort. Over rounds they are kept as pairs high + low of float32 (`add`,
two-sum of Knuth, some 40 bits), and `solve` reads them in float64, inside the compiled round: what
is lost is what float32 loses within one cohort.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat import errors, parts
from fedjax_flat.algorithms.base import Algorithm, Exchange, Metrics, Reply, zeros
from fedjax_flat.client import Client, LocalInfo
from fedjax_flat.models import CLASSIFIER, Variables
from fedjax_flat.wire import bits_of

Measure = Callable[[jax.Array, jax.Array], Any]  # of a batch's features and one-hot labels
Head = tuple[jax.Array, jax.Array]  # (kernel, bias)


class Total(NamedTuple):
    """high + low is the sum; both are trees of float32."""

    high: Any
    low: Any

    def in_float64(self) -> Any:
        """Their values; call it, and use them, inside `with jax.enable_x64(True)`."""
        wide = lambda high, low: high.astype(jnp.float64) + low.astype(jnp.float64)
        return jax.tree.map(wide, self.high, self.low)


class ClosedFormState(NamedTuple):
    """The model with the newest classifier, and the sums it is solved from."""

    model: Variables
    sums: Total


def closed_form(
    client: Client,
    measure: Measure,
    solve: Callable[[Total], Head],
    *,
    bits: Callable[[Any], int] | None = None,
    metrics: Callable[[Total, jax.Array, jax.Array], Metrics] | None = None,
    advice: str = Algorithm._field_defaults["advice"],
    prior: Total | None = None,
) -> Algorithm:
    """The classifier that `solve` makes of the sums of `measure`.

    `metrics(sums, clients, classes)` are of a round in which so many clients sent theirs; `classes`
    is how many each of them has, added up. `prior` are sums of clients that came before.
    """

    def init(variables, num_clients):
        del num_clients
        kernel = head_of(variables)["kernel"]
        row = lambda width: jax.ShapeDtypeStruct((1, width), jnp.float32)
        shapes = jax.eval_shape(measure, *map(row, kernel.shape))
        nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        sums = prior or Total(nothing, zeros(nothing))
        _check_prior(sums.high, shapes)
        return ClosedFormState(variables, sums), jnp.zeros((), bool)

    def local(message, counted, data, round, key):
        del round, key
        new = data.empty_where(counted)
        sums, classes, seen = client_sums(client, message, new, measure)
        info = LocalInfo(seen, jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32), (), {})
        present = new.size > 0
        return Reply(jnp.ones_like(counted), info, jnp.float32(0), present, sum=(sums, classes))

    def update(server, uploads, round):
        del round
        new, classes = uploads.sum
        sums = add(server.sums, new)
        model = with_head(server.model, *solve(sums))
        found = metrics(sums, uploads.clients, classes) if metrics else {}
        return ClosedFormState(model, sums), found

    def weigh(message, upload, own):
        """Nothing down: clients have the network already."""
        del message, own
        arrays = {n: x for n, x in parts.take(upload, lambda name: True).items() if x.ndim}
        return 0, (bits or bits_of)(arrays)

    return Algorithm(
        init=init,
        exchanges=(
            Exchange(lambda server, round: server.model, local, update, bits=(weigh,)),
        ),
        models=lambda server: {"global": server.model},
        advice=advice,
    )


def _check_prior(sums: Any, expected: Any) -> None:
    shapes = lambda tree: jax.tree.map(lambda x: x.shape, tree)
    if shapes(sums) != shapes(expected):
        raise errors.UsageError(
            f"prior sums of shapes {shapes(sums)}: expected {shapes(expected)}, of the same "
            "features, classes and bias."
        )


def client_sums(client: Client, model: Variables, data: Any, measure: Measure) -> tuple:
    """(sums of `measure`, how many classes there are, the task's sums) over all of a client."""
    classes = head_of(model)["kernel"].shape[1]

    def of_batch(stored):
        batch = client.task.prepare(stored, None)
        outputs = client.task.forward(model, batch, None)
        if batch.labels.ndim != 1:
            raise errors.UsageError(
                f"a classifier in closed form of labels of shape {batch.labels.shape}: expected "
                "one class per example."
            )
        real = batch.mask.astype(jnp.float32)[:, None]
        features = jnp.where(batch.mask[:, None], outputs.features.astype(jnp.float32), 0.0)
        labels = jax.nn.one_hot(batch.labels, classes, dtype=jnp.float32) * real
        seen = client.task.measure(outputs, batch)
        return measure(features, labels), jnp.sum(labels, axis=0), seen

    sums, counts, seen = client.over(of_batch, data)
    return sums, jnp.sum((counts > 0).astype(jnp.float32)), seen


def add(total: Total, more: Any) -> Total:
    """total + more, with what rounding drops from `high` kept in `low`."""

    def one(high, low, x):
        new = high + x
        part = new - high
        return new, low + ((high - (new - part)) + (x - part))

    pairs = jax.tree.map(one, total.high, total.low, more)
    return Total(*jax.tree.transpose(
        jax.tree.structure(more), jax.tree.structure((0, 0)), pairs
    ))


def head_of(variables: Variables) -> dict[str, jax.Array]:
    """The classifier's parameters: a kernel (features, classes) and a bias (classes)."""
    head = variables.params.get(CLASSIFIER, {}) if isinstance(variables.params, dict) else {}
    shapes = {name: x.shape for name, x in head.items()}
    if set(shapes) != {"kernel", "bias"} or len(shapes["kernel"]) != 2:
        raise errors.UsageError(
            f"a classifier in closed form: expected a model whose last module is named "
            f"{CLASSIFIER!r} and has a kernel of shape (features, classes) and a bias; it has "
            f"{shapes or 'no such module'}."
        )
    return head


def with_head(variables: Variables, kernel: jax.Array, bias: jax.Array) -> Variables:
    """`variables` with this classifier."""
    head = {"kernel": kernel, "bias": bias}
    return variables._replace(params={**variables.params, CLASSIFIER: head})
