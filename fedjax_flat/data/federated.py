"""Examples on the device, once, in the type they have, and who owns them.

Ownership is two flat arrays, not a padded table: client k owns the positions offset_k ..
offset_k + size_k of `indices`. A batch is gathered by index inside the compiled step. Where only
some clients' examples are on the device (data/host.py), `present` says whose, and they stand in
the order of `indices`.

A member of a cohort is a client, or a group of clients that train one after the other: `grouped`
makes groups the members, and everything else stays as it is.
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


class ClientData(struct.PyTreeNode):
    """One member's view: the shared arrays, and where its own part of them lies."""

    examples: Examples
    indices: jax.Array
    client: Any
    offset: Any
    size: Any  # a Python int when every client has the same size, so that loops are static
    max_size: int = struct.field(pytree_node=False)
    group: Any = None  # of a group: (clients, offsets, sizes), each an array
    own: Any = struct.field(default_factory=dict)  # leaves of the model that stay with the client
    brought: Any = struct.field(default_factory=dict)  # by the message or kept, for terms; by name
    shift: Any = struct.field(pytree_node=False, default=None)  # see shift.Shift
    gathered: bool = struct.field(pytree_node=False, default=False)  # examples stand as indices do
    classes: Any = None  # of a client whose head has only its own classes: which they are

    @property
    def in_group(self) -> int:
        """How many clients, at most, are in this group; 0 for a client by itself."""
        return 0 if self.group is None else self.group[0].shape[0]

    def member(self, i: Any) -> "ClientData":
        """Client i of this group."""
        client, offset, size = (x[i] for x in self.group)
        return self.replace(client=client, offset=offset, size=size, group=None)

    def empty_where(self, gone: jax.Array) -> "ClientData":
        """The same without examples where `gone` is True."""
        left = lambda size: jnp.where(gone, 0, size)
        group = self.group and (*self.group[:2], left(self.group[2]))
        return self.replace(size=left(self.size), group=group)


class FederatedData(struct.PyTreeNode):
    """All clients' examples on the device."""

    examples: Examples
    indices: jax.Array
    offsets: jax.Array
    sizes: jax.Array
    max_size: int = struct.field(pytree_node=False)
    equal_sizes: bool = struct.field(pytree_node=False)
    groups: Any = None  # (groups, clients in each): client numbers, -1 for none
    present: Any = None  # the clients, ascending, that offsets and sizes are of; None for all
    unlabelled: Any = None  # inputs of examples that the server has
    shift: Any = struct.field(pytree_node=False, default=None)  # how each client sees its examples
    classes: Any = None  # (clients, classes), where heads have only a client's own: which it has

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
            group = (clients, self.offsets[rows], sizes)
            return ClientData(
                *shared, jnp.int32(0), jnp.sum(sizes), self.max_size, group, **self._how
            )
        row = self.row(k)
        size: Any = self.max_size if self.equal_sizes else self.sizes[row]
        if mask is not None:
            size = jnp.where(mask, size, 0)
        classes = None if self.classes is None else self.classes[k]
        return ClientData(
            *shared, self.offsets[row], size, self.max_size, classes=classes, **self._how
        )

    @property
    def _how(self) -> dict[str, Any]:
        return {"shift": self.shift, "gathered": self.present is not None}


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


def grouped(data: FederatedData, groups: Partition) -> FederatedData:
    """The same clients, of which those of a group train one after the other, in its order."""
    groups.check(data.num_clients, of="client")
    longest = int(groups.sizes.max())
    rows = [np.pad(groups.client(g), (0, longest - n), constant_values=-1)
            for g, n in enumerate(groups.sizes)]
    return data.replace(groups=jax.device_put(np.stack(rows).astype(np.int32)))


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
    return batch if data.shift is None else data.shift.see(batch, data.client, index)


def sum_over(f: Callable[[Any], Any], count: Any) -> Any:
    """The sum of the trees f(0) .. f(count - 1); zeros when there is none."""
    shapes = jax.eval_shape(f, jax.ShapeDtypeStruct((), jnp.int32))
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.fori_loop(0, count, lambda i, total: optax.tree.add(total, f(i)), zero)


def over(f: Callable[[Batch], Any], data: ClientData, batch_size: int) -> Any:
    """The sum of f(batch) over all a member's examples, in masked batches of their order."""
    if data.in_group:
        return sum_over(lambda i: over(f, data.member(i), batch_size), data.in_group)
    positions = lambda i: i * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
    return sum_over(lambda i: f(client_batch(data, positions(i))), -(-data.size // batch_size))
