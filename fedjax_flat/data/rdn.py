"""FedRDN: train images are normalised as another client's would be.

Yan et al., "A simple data augmentation for feature distribution skewed federated learning" (2023),
as Fani's thesis uses it (table 3.9). Every client has the mean mu_k and deviation sigma_k of each
channel of its images, as it sees them (data/shift.py), and all clients get to know all of them:

    training      x <- (x - mu_j) / sigma_j,   j a client at random, for every image anew
    evaluation    x <- (x - mu_k) / sigma_k,   k the client that sees the image

Each client may stand for itself, or all clients k of one k mod `groups` together: the thesis has
test images normalised by the statistics of their group, of three. A test image is seen by client
(index mod K), as data/shift.py has it. What clients send, two numbers per channel once, is not
counted as traffic.

An image has to say who sees it: the shift hands the group on beside the image, as a tree. Plain
images, of whom nobody says so, are normalised by the statistics of all clients.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_flat import errors, rng
from fedjax_flat.data.partition import Partition
from fedjax_flat.data.shift import Shift, looks
from fedjax_flat.data.sources import Dataset


class Normals(NamedTuple):
    """Means and deviations, (groups + 1, channels), of values from 0 to 1; the last are of all."""

    mean: np.ndarray
    std: np.ndarray
    clients: int
    max_value: float

    @property
    def groups(self) -> int:
        """How many statistics there are, without those of all."""
        return len(self.mean) - 1

    def images(self, inputs: Any) -> jax.Array:
        """Of a batch, without who sees them."""
        return inputs["image"] if isinstance(inputs, dict) else inputs

    def own(self, inputs: Any) -> jax.Array:
        """The group of each image."""
        if isinstance(inputs, dict):
            return inputs["group"]
        return jnp.full(inputs.shape[0], self.groups, jnp.int32)

    def drawn(self, key: jax.Array, count: int) -> jax.Array:
        """The group of a random client for each image."""
        draw = lambda key: jax.random.randint(key, (), 0, self.clients, jnp.int32)
        return jax.vmap(draw)(rng.fold_each(key, count)) % self.groups

    def normalise(self, images: jax.Array, group: jax.Array) -> jax.Array:
        """Each image by its group's statistics."""
        one = lambda table: jnp.asarray(table, jnp.float32)[group][:, None, None, :]
        return (images.astype(jnp.float32) / self.max_value - one(self.mean)) / one(self.std)

    def tagged(self, shift: Shift | None) -> Shift:
        """`shift`, which says of every image to which group the client belongs that sees it."""

        def see(batch, client, index):
            seen = batch if shift is None else shift.see(batch, client, index)
            group = jnp.full(index.shape, client % self.groups, jnp.int32)
            return seen._replace(inputs={"image": seen.inputs, "group": group})

        return Shift(see)


def normals(
    dataset: Dataset, partition: Partition, shift: Shift | None, groups: int = 0
) -> Normals:
    """Of the clients' train images as they see them; `groups` = 0 is each client by itself."""
    shape = dataset.input_shape
    if not isinstance(shape, tuple) or len(shape) != 3:
        raise errors.UsageError(
            f"data.rdn of inputs of shape {shape} ({dataset.name}): expected images, (height, "
            "width, channels)."
        )
    if shift is not None and not shift.evaluated:
        raise errors.UsageError(
            "data.rdn with a shift that evaluation does not see (flip_labels): expected one that "
            "changes images, or none."
        )
    count = groups or partition.num_clients
    total, examples = np.zeros((2, count, shape[-1])), np.zeros(count)
    clients, start = partition.client_of, 0
    as_stored = Shift(lambda batch, client, index: batch)
    for seen in looks(shift or as_stored, dataset.train, clients, partition.indices):
        values = np.asarray(seen.inputs, np.float64) / dataset.max_value
        here = clients[start : start + len(values)] % count
        start += len(values)
        np.add.at(total[0], here, values.mean(axis=(1, 2)))
        np.add.at(total[1], here, np.square(values).mean(axis=(1, 2)))
        np.add.at(examples, here, 1)
    whole = total.sum(axis=1, keepdims=True) / examples.sum()
    empty = (examples == 0)[None, :, None]
    means = np.where(empty, whole, total / np.maximum(examples, 1)[None, :, None])
    mean, square = np.concatenate([means, whole], axis=1)
    deviation = np.sqrt(np.maximum(square - mean**2, 0)) + 1e-6
    as_float = lambda x: x.astype(np.float32)
    return Normals(as_float(mean), as_float(deviation), partition.num_clients, dataset.max_value)
