"""A multi-layer perceptron with ReLU, for the embedded digits and for tests."""

from collections.abc import Sequence

import flax.linen as nn
import jax

from fedjax_flat.models.layers import Dense


class MLP(nn.Module):
    """Flatten, then one ReLU layer per entry of `hidden`, then the classifier."""

    num_classes: int
    hidden: Sequence[int] = (64,)

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        del train
        x = x.reshape(x.shape[0], -1)
        for width in self.hidden:
            x = nn.relu(Dense(width)(x))
        return Dense(self.num_classes, name="classifier")(x)
