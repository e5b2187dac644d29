"""Examples on the device, once, as uint8, and who owns them.

Ownership is two flat arrays, not a padded table: client k owns the positions offset_k ..
offset_k + size_k of `indices`. A batch is gathered by index inside the compiled step.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from fedjax_flat import rng
from fedjax_flat.data.partition import Partition
from fedjax_flat.data.sources import Examples


class Batch(NamedTuple):
    """`mask` is False where a row is padding; such a row counts nowhere."""

    images: jax.Array
    labels: jax.Array
    mask: jax.Array


@struct.dataclass
class ClientData:
    """One client's view: the shared arrays, and where its own part of them lies."""

    examples: Examples
    indices: jax.Array
    client: Any
    offset: Any
    size: Any  # a Python int when every client has the same size, so that loops are static
    max_size: int = struct.field(pytree_node=False)


@struct.dataclass
class FederatedData:
    """All clients' examples on the device."""

    examples: Examples
    indices: jax.Array
    offsets: jax.Array
    sizes: jax.Array
    max_size: int = struct.field(pytree_node=False)
    equal_sizes: bool = struct.field(pytree_node=False)

    @property
    def num_clients(self) -> int:
        """K."""
        return self.offsets.shape[0]

    def client(self, k: jax.Array, mask: jax.Array | None = None) -> ClientData:
        """Client k; where `mask` is False, an empty client."""
        size: Any = self.max_size if self.equal_sizes else self.sizes[k]
        if mask is not None:
            size = jnp.where(mask, size, 0)
        return ClientData(self.examples, self.indices, k, self.offsets[k], size, self.max_size)


def federate(examples: Examples, partition: Partition) -> FederatedData:
    """Puts examples and ownership on the device."""
    partition.check(len(examples.labels))
    sizes = partition.sizes
    put = lambda x, dtype: jax.device_put(np.asarray(x, dtype))
    return FederatedData(
        examples=on_device(examples),
        indices=put(partition.indices, np.int32),
        offsets=put(partition.offsets[:-1], np.int32),
        sizes=put(sizes, np.int32),
        max_size=int(sizes.max()),
        equal_sizes=bool(sizes.min() == sizes.max()),
    )


def on_device(examples: Examples) -> Examples:
    """Uint8 images and int32 labels as device arrays."""
    return Examples(
        jax.device_put(np.asarray(examples.images, np.uint8)),
        jax.device_put(np.asarray(examples.labels, np.int32)),
    )


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
    index = data.indices[data.offset + jnp.where(mask, positions, 0)]
    return Batch(data.examples.images[index], data.examples.labels[index], mask)
