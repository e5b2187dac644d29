"""Examples on the device, once, in the type they have, and who owns them.

Ownership is two flat arrays, not a padded table: client k owns the positions offset_k ..
offset_k + size_k of `indices`. A batch is gathered by index inside the compiled step. Where only
some clients' examples are on the device (data/host.py), `present` says whose, and they stand in
the order of `indices`.

A member of a cohort is a client, or a group of clients that train one after the other: `grouped`
makes groups the members, and everything else stays as it is. How many clients a group has is a
number, not a shape: shorter groups cost no more than their clients do.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from fedjax_flat import errors, rng
from fedjax_flat.data.partition import Partition
from fedjax_flat.data.sources import Examples, count_of


class Batch(NamedTuple):
    """Trees with examples first; `mask` is False where a row is padding, which counts nowhere."""

    inputs: Any
    labels: Any
    mask: jax.Array


class Group(NamedTuple):
    """Clients that train one after the other; arrays, padded at the end."""

    clients: jax.Array
    offsets: jax.Array
    sizes: jax.Array
    length: jax.Array  # how many of them are there
    key: Any = None  # of which each client folds its own, whomever it trains with

    def empty_where(self, gone: jax.Array) -> "Group":
        """The same with nobody where `gone` is True."""
        return self._replace(
            sizes=jnp.where(gone, 0, self.sizes), length=jnp.where(gone, 0, self.length)
        )

    def shuffled(self, key: jax.Array) -> "Group":
        """In an order that depends on who is in it, and not on how they were listed."""
        own = jax.vmap(lambda k: jax.random.bits(rng.fold(key, k), dtype=jnp.uint32) >> 1)
        there = jnp.arange(self.clients.shape[0]) < self.length
        order = jnp.argsort(jnp.where(there, own(self.clients), jnp.uint32(2**32 - 1)))
        return self._replace(
            clients=self.clients[order], offsets=self.offsets[order], sizes=self.sizes[order]
        )


class ClientData(struct.PyTreeNode):
    """One member's view: the shared arrays, and where its own part of them lies."""

    examples: Examples
    indices: jax.Array
    client: Any
    offset: Any
    size: Any  # a Python int when every client has the same size, so that loops are static
    max_size: int = struct.field(pytree_node=False)
    group: Group | None = None
    passes: int = struct.field(pytree_node=False, default=1)  # of a group: times around
    slot: Any = 0  # which of the cohort's members it is
    cluster: Any = 0  # whose server it reports to, where there are several
    own: Any = struct.field(default_factory=dict)  # leaves of the model that stay with the client
    brought: Any = struct.field(default_factory=dict)  # by the message or kept, for terms; by name
    shift: Any = struct.field(pytree_node=False, default=None)  # see shift.Shift
    gathered: bool = struct.field(pytree_node=False, default=False)  # examples stand as indices do
    classes: Any = None  # of a client whose head has only its own classes: which they are
    bank: Any = None  # styles that its train images may take on; see styles.py
    labelled: Examples | None = None  # the server's, for who trains where the server is

    def member(self, i: Any) -> "ClientData":
        """Client i of this group."""
        group = self.group
        assert group is not None
        return self.replace(
            client=group.clients[i], offset=group.offsets[i], size=group.sizes[i], group=None
        )

    def empty_where(self, gone: jax.Array) -> "ClientData":
        """The same without examples where `gone` is True."""
        group = self.group and self.group.empty_where(gone)
        return self.replace(size=jnp.where(gone, 0, self.size), group=group)


class FederatedData(struct.PyTreeNode):
    """All clients' examples on the device."""

    examples: Examples
    indices: jax.Array
    offsets: jax.Array
    sizes: jax.Array
    max_size: int = struct.field(pytree_node=False)
    equal_sizes: bool = struct.field(pytree_node=False)
    groups: Any = None  # (groups, clients in each): client numbers, then -1 for none
    passes: int = struct.field(pytree_node=False, default=1)
    clusters: Any = None  # of each client, the number of its cluster
    present: Any = None  # the clients, ascending, that offsets and sizes are of; None for all
    unlabelled: Any = None  # inputs of examples that the server has
    labelled: Examples | None = None  # other examples of the server's, labels and all
    shift: Any = struct.field(pytree_node=False, default=None)  # how each client sees its examples
    classes: Any = None  # (clients, classes), where heads have only a client's own: which it has
    bank: Any = None  # styles that train images may take on; see styles.py

    @property
    def num_clients(self) -> int:
        """K: the number of clients, or of groups."""
        return (self.offsets if self.groups is None else self.groups).shape[0]

    def row(self, k: jax.Array) -> jax.Array:
        """Where offset and size of client k stand."""
        if self.present is None:
            return k
        return jnp.minimum(jnp.searchsorted(self.present, k), self.present.shape[0] - 1)

    def client(self, k: jax.Array, mask: jax.Array | None = None) -> ClientData:
        """Member k; where `mask` is False, an empty one."""
        shared = (self.examples, self.indices, k)
        if self.groups is not None:
            clients = self.groups[k]
            there = clients >= 0 if mask is None else (clients >= 0) & mask
            clients = jnp.maximum(clients, 0)
            rows = self.row(clients)
            sizes = jnp.where(there, self.sizes[rows], 0)
            group = Group(clients, self.offsets[rows], sizes, jnp.sum(there, dtype=jnp.int32))
            return ClientData(
                *shared, jnp.int32(0), jnp.sum(sizes), self.max_size, group, self.passes,
                **self._how,
            )
        row = self.row(k)
        size: Any = self.max_size if self.equal_sizes else self.sizes[row]
        if mask is not None:
            size = jnp.where(mask, size, 0)
        classes = None if self.classes is None else self.classes[k]
        cluster: Any = 0 if self.clusters is None else self.clusters[k]
        return ClientData(
            *shared, self.offsets[row], size, self.max_size, classes=classes, cluster=cluster,
            **self._how,
        )

    @property
    def _how(self) -> dict[str, Any]:
        return {
            "shift": self.shift, "gathered": self.present is not None, "bank": self.bank,
            "labelled": self.labelled,
        }


def federate(
    examples: Examples, partition: Partition, *, shift: Any = None, classes: Any = None
) -> FederatedData:
    """Puts examples and ownership on the device; each client sees its own through `shift`.

    `classes` says which ones each client has, (clients, classes), where heads are pruned to them.
    """
    partition.check(count_of(examples))
    sizes = partition.sizes
    put = lambda x, dtype: jax.device_put(np.asarray(x, dtype))
    return FederatedData(
        examples=on_device(examples),
        indices=put(partition.indices, np.int32),
        offsets=put(partition.offsets[:-1], np.int32),
        sizes=put(sizes, np.int32),
        max_size=int(sizes.max()),
        equal_sizes=bool(sizes.min() == sizes.max()),
        shift=shift,
        classes=None if classes is None else put(classes, bool),
    )


def grouped(data: FederatedData, groups: Partition, *, passes: int = 1) -> FederatedData:
    """The same clients, of which those of a group train one after the other."""
    rows = rows_of(groups, data.num_clients)
    return data.replace(groups=jax.device_put(rows), passes=passes)


def rows_of(groups: Partition, num_clients: int, shape: tuple[int, int] = (0, 0)) -> np.ndarray:
    """Groups as rows of client numbers, filled up with -1, in an array of at least this shape."""
    groups.check(num_clients, of="client")
    count, longest = (max(x) for x in zip(shape, (groups.num_clients, groups.sizes.max()),
                                          strict=True))
    rows = np.full((int(count), int(longest)), -1, np.int32)
    place = np.arange(groups.indices.size) - np.repeat(groups.offsets[:-1], groups.sizes)
    rows[groups.client_of, place] = groups.indices
    return rows


def whole(examples: Examples) -> ClientData:
    """One client that owns all examples."""
    examples = jax.tree.map(jnp.asarray, examples)
    count = count_of(examples)
    return ClientData(examples, jnp.arange(count), jnp.int32(0), jnp.int32(0), count, count)


def on_device(examples: Examples) -> Examples:
    """Every array as it is, but for 64-bit numbers, which become 32-bit ones if they fit."""
    return jax.tree.map(lambda x: jax.device_put(narrow(np.asarray(x))), examples)


def narrow(x: np.ndarray) -> np.ndarray:
    """64-bit numbers as 32-bit ones, if they fit."""
    smaller: Any = {"float64": np.float32, "int64": np.int32, "uint64": np.uint32}.get(x.dtype.name)
    if x.dtype.kind not in "fiub":
        raise errors.UsageError(
            f"examples of type {x.dtype}: expected numbers. Encode text and categories first."
        )
    if smaller is None:
        return x
    if x.dtype.kind != "f" and x.size:
        limits = np.iinfo(smaller)
        if x.min() < limits.min or x.max() > limits.max:
            raise errors.UsageError(
                f"examples hold {x.min()} to {x.max()}, more than {np.dtype(smaller)} can: "
                f"expected {limits.min} to {limits.max}."
            )
    return x.astype(smaller)


def shuffled_positions(key: jax.Array, size: Any, length: int) -> jax.Array:
    """The positions 0 .. size-1 in random order, then the padding up to `length`.

    Each position draws its own sort key, so the order of the real ones does not depend on how much
    padding follows.
    """
    draw = lambda key: jax.random.bits(key, dtype=jnp.uint32) >> 1
    draws = jax.vmap(draw)(rng.fold_each(key, length))
    position = jnp.arange(length)
    return jnp.argsort(jnp.where(position < size, draws, jnp.uint32(2**32 - 1)))


def client_batch(data: ClientData, positions: jax.Array) -> Batch:
    """Gathers the examples at `positions` of a client; positions past its size are padding."""
    mask = positions < data.size
    place = data.offset + jnp.where(mask, positions, 0)
    index = data.indices[place]
    row = place if data.gathered else index
    inputs, labels = jax.tree.map(lambda x: x[row], data.examples)
    batch = Batch(inputs, labels, mask)
    if data.shift is not None:
        batch = data.shift.see(batch, data.client, index)
    if data.bank is None:
        return batch
    return batch._replace(inputs=marked(batch.inputs, data.client, positions, data.bank))


def marked(images: Any, client: Any, positions: jax.Array, bank: Any) -> dict[str, Any]:
    """Images of a client, at these positions of what it has, with styles that they may take on."""
    return {"image": images, "client": client, "position": positions, "bank": bank}


def sum_over(f: Callable[[Any], Any], count: Any) -> Any:
    """The sum of the trees f(0) .. f(count - 1); zeros when there is none."""
    shapes = jax.eval_shape(f, jax.ShapeDtypeStruct((), jnp.int32))
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.fori_loop(0, count, lambda i, total: optax.tree.add(total, f(i)), zero)


def over(f: Callable[[Batch], Any], data: ClientData, batch_size: int) -> Any:
    """The sum of f(batch) over all a member's examples, in masked batches of their order."""
    if data.group is not None:
        return sum_over(lambda i: over(f, data.member(i), batch_size), data.group.length)
    positions = lambda i: i * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
    return sum_over(lambda i: f(client_batch(data, positions(i))), -(-data.size // batch_size))
