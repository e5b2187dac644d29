"""A linear classifier, for inputs that are features already."""

import flax.linen as nn
import jax

from fedjax_flat.models.layers import Dense


class Linear(nn.Module):
    """Flatten, then the classifier."""

    num_classes: int

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        del train
        return Dense(self.num_classes, name="classifier")(x.reshape(x.shape[0], -1))
