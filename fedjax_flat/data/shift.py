"""Clients that see the world differently, each in its own way, which its number decides.

A shift is a pure function of a stored batch, the client's number and the examples' indices. It is
applied inside the compiled step, where a client's batch is gathered and before `task.prepare`, so
that local training, full gradients, sums over a client's data and evaluation on clients all see it.
What is random is folded from (seed, client, index): an example of a client always looks the same.

    noise        client k of K adds Gaussian noise of deviation sigma (k + 1) / K (feature skew of
                 Li et al., "Federated learning on non-IID data silos", 2022, whose growth is of the
                 variance, on images that are not clipped)
    rgb          of client k, channel k mod 3 times delta and the two others times 1 / delta
    rotation     client k turns its images by `degrees` (k mod groups), counterclockwise; bilinear,
                 black around it, exact for multiples of 90 degrees of a square image
    flip_labels  round(share K) clients, drawn by the seed, have wrong labels in all their examples:
                 C - 1 - y, or another class at random (attackers; what is evaluated stays right)

Images keep their type. Bytes, and other whole numbers, are computed in float32, rounded and clipped
to 0 .. max_value, as a camera would store them, so noise far below one grey level does nothing;
numbers that are floats already are neither rounded nor clipped. `sigma` is in units of max_value.

Splits (train, test, validation) are shifted once, on the way to the device: an example of a client
as this client sees it, one that nobody owns as client (index mod K) does, so that a test set is a
mixture of the clients' worlds in equal parts.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_flat import errors, rng
from fedjax_flat.data import geometry
from fedjax_flat.data.federated import Batch
from fedjax_flat.data.partition import Partition
from fedjax_flat.data.sources import Dataset, Examples, count_of
from fedjax_flat.registry import Entry, Registry, entry
from fedjax_flat.settings import Setting


class Shift(NamedTuple):
    """`see(batch, client, index)`: stored examples as this client has them; same shapes and types.

    `index` counts train examples from 0, and test examples on after them.
    """

    see: Callable[[Batch, Any, jax.Array], Batch]
    evaluated: bool = True  # whether train, validation and test splits are shifted too


def noise(dataset: Dataset, clients: int, *, sigma: float, seed: int) -> Shift:
    """Gaussian noise of deviation sigma (k + 1) / K."""
    kind = jax.tree.leaves(dataset.train.inputs)[0].dtype.kind
    if kind != "f" or not isinstance(dataset.input_shape, tuple):
        _image_shape("noise", dataset)

    def see(batch, client, index):
        deviation = sigma * dataset.max_value / clients * (client + 1).astype(jnp.float32)
        key = rng.fold(jax.random.key(seed), "noise", client)

        def one(i, image):
            draw = jax.random.normal(jax.random.fold_in(key, i), image.shape)
            noisy = image.astype(jnp.float32) + deviation * draw
            return geometry.stored_as(noisy, image, dataset.max_value)

        return batch._replace(inputs=_each(one, index, batch.inputs))

    return Shift(see)


def rgb(dataset: Dataset, clients: int, *, delta: float) -> Shift:
    """Channel k mod 3 times delta, the others divided by it."""
    del clients
    if _image_shape("rgb", dataset)[-1] != 3:
        raise errors.UsageError(
            f"shift rgb of images of shape {dataset.input_shape} ({dataset.name}): expected three "
            "channels."
        )

    def see(batch, client, index):
        del index
        gains = jnp.where(jnp.arange(3) == client % 3, delta, 1 / delta).astype(jnp.float32)
        gains = gains.reshape((1,) * (batch.inputs.ndim - 1) + (3,))
        images = batch.inputs.astype(jnp.float32) * gains
        return batch._replace(
            inputs=geometry.stored_as(images, batch.inputs, dataset.max_value)
        )

    return Shift(see)


def rotation(dataset: Dataset, clients: int, *, degrees: float, groups: int) -> Shift:
    """Turned by `degrees` (k mod groups)."""
    del clients
    _image_shape("rotation", dataset)
    if dataset.task == "segmentation":
        raise errors.UsageError(
            f"shift rotation of {dataset.name}, whose labels are of pixels: expected one label per "
            "image, because labels are not turned."
        )
    turns = np.array([_cosine_and_sine(degrees * g) for g in range(groups)], np.float32)

    def see(batch, client, index):
        cosine, sine = jnp.asarray(turns)[client % groups]
        turn = lambda i, image: geometry.rotate(image, cosine, sine)
        return batch._replace(inputs=_each(turn, index, batch.inputs))

    return Shift(see)


def flip_labels(dataset: Dataset, clients: int, *, share: float, to: str, seed: int) -> Shift:
    """Wrong labels on a share of the clients."""
    labels, classes = dataset.train.labels, dataset.num_classes
    if dataset.task != "classification" or np.ndim(labels) != 1 or classes < 2:
        raise errors.UsageError(
            f"shift flip_labels of {dataset.name}, of task {dataset.task}, {classes} classes and "
            f"labels of shape {np.shape(labels)}: expected one of two or more classes per example."
        )
    flipped = np.isin(np.arange(clients), flipping(clients, share, seed))

    def see(batch, client, index):
        right = batch.labels
        if to == "mirrored":
            wrong = classes - 1 - right
        else:
            key = rng.fold(jax.random.key(seed), "flip labels", client)
            draw = lambda i: jax.random.randint(jax.random.fold_in(key, i), (), 1, classes)
            wrong = ((right.astype(jnp.int32) + _each(draw, index)) % classes).astype(right.dtype)
        return batch._replace(labels=jnp.where(jnp.asarray(flipped)[client], wrong, right))

    return Shift(see, evaluated=False)


def flipping(clients: int, share: float, seed: int) -> np.ndarray:
    """The clients, round(share K) of them, whose labels `flip_labels` makes wrong."""
    order = np.random.default_rng([seed, 2]).permutation(clients)
    return np.sort(order[: round(share * clients)])


def evaluated(shift: Shift | None, first: int = 0) -> Shift | None:
    """What of a shift is seen in evaluation, of examples that are counted from `first` on."""
    if shift is None or not shift.evaluated:
        return None
    see = shift.see
    return Shift(lambda batch, client, index: see(batch, client, first + index))


def seen(shift: Shift | None, dataset: Dataset, partition: Partition) -> Dataset:
    """The data set as its examples are evaluated: each as its client sees it."""
    if shift is None or not shift.evaluated:
        return dataset
    count, clients = count_of(dataset.train), partition.num_clients
    owners = np.arange(count) % clients
    owners[partition.indices] = np.repeat(np.arange(clients), partition.sizes)
    tests = np.arange(count_of(dataset.test))
    train = _look(shift, dataset.train, owners, np.arange(count))
    test = _look(shift, dataset.test, tests % clients, count + tests)
    return dataclasses.replace(dataset, train=train, test=test)


def _look(shift: Shift, examples: Examples, clients, index) -> Examples:
    """All of these examples, each as one client sees it."""
    seen = looks(shift, examples, clients, index, places=np.arange(len(index)))
    return jax.tree.map(lambda *x: np.concatenate(x), *seen)


def looks(
    shift: Shift, examples: Examples, clients, index, *, places=None, size: int = 500
) -> Iterator[Examples]:
    """Examples on the host, each as one client sees it, `size` at a time.

    `index` is what the shift counts them by; they stand at `places`, by default at `index`.
    """
    places = index if places is None else places

    @jax.jit
    def of(examples, clients, index):
        def one(example, client, i):
            stored = jax.tree.map(lambda x: x[None], example)
            batch = Batch(stored.inputs, stored.labels, jnp.ones(1, bool))
            seen = shift.see(batch, client, i[None])
            return jax.tree.map(lambda x: x[0], Examples(seen.inputs, seen.labels))

        return jax.vmap(one)(examples, clients, index)

    for start in range(0, len(index), size):
        here = np.minimum(np.arange(start, start + size), len(index) - 1)
        batch = jax.tree.map(lambda x, at=places[here]: np.asarray(x)[at], examples)
        seen = of(batch, clients[here].astype(np.int32), index[here].astype(np.int32))
        real = min(size, len(index) - start)
        yield jax.tree.map(lambda x, real=real: np.asarray(x)[:real], seen)


def _each(f, index: jax.Array, *arrays: jax.Array) -> jax.Array:
    """f(index, ...) of every example; `index` has several axes where batches are stacked."""
    for _ in range(index.ndim):
        f = jax.vmap(f)
    return f(index, *arrays)


def _cosine_and_sine(degrees: float) -> tuple[float, float]:
    """Of an angle; whole numbers for multiples of 90 degrees."""
    quarters, rest = divmod(degrees, 90)
    cosine, sine = math.cos(math.radians(rest)), math.sin(math.radians(rest))
    for _ in range(int(quarters) % 4):
        cosine, sine = -sine, cosine
    return cosine, sine


def _image_shape(name: str, dataset: Dataset) -> tuple[int, ...]:
    shape = dataset.input_shape
    if not isinstance(shape, tuple) or len(shape) != 3:
        raise errors.UsageError(
            f"shift {name} of inputs of shape {shape} ({dataset.name}): expected images, (height, "
            "width, channels)."
        )
    return shape


def none(dataset: Dataset, clients: int) -> None:
    """Clients see their examples as they are."""
    del dataset, clients


_SEED = Setting(
    0, "apart from the training seed, so that seeds share their data", at_least=0, below=2**32
)
# make(dataset, number of clients, **settings) -> Shift
SHIFTS: Registry[Entry] = Registry("data.shift")
SHIFTS.add("none", entry(none))
SHIFTS.add("noise", entry(noise, {
    "sigma": Setting(0.1, "deviation on the last client, of max_value", at_least=0), "seed": _SEED,
}))
SHIFTS.add("rgb", entry(rgb, {"delta": Setting(1.5, "gain of a group's channel", above=0)}))
SHIFTS.add("rotation", entry(rotation, {
    "degrees": Setting(90.0, "between one group of clients and the next"),
    "groups": Setting(4, "of clients, by number", at_least=1),
}))
SHIFTS.add("flip_labels", entry(flip_labels, {
    "share": Setting(0.1, "of the clients", at_least=0, at_most=1),
    "to": Setting("mirrored", "C - 1 - y, or another class", choices=("mirrored", "random")),
    "seed": _SEED,
}))
