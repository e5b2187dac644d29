"""The LeNet-like CNN of the FedSAM and FedGloSS papers.

conv 5x5 (64) - max pool - conv 5x5 (64) - max pool - 384 - 192 - classes, ReLU, no padding:
797,962 parameters for 10 classes, 815,332 for 100. Pooling comes before bias and ReLU, which
changes nothing but the work.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax

from fedjax_flat.models.layers import Conv, Dense, EndOfBlock


class CNN(nn.Module):
    """For images of 32x32x3; the flattened features are 64 * 5 * 5 = 1600."""

    num_classes: int
    hidden: Sequence[int] = (64, 64, 384, 192)  # channels, channels, and two dense layers

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        del train
        for width in self.hidden[:2]:
            x = EndOfBlock()(nn.relu(Conv(width, (5, 5), pool=2)(x)))
        x = x.reshape(x.shape[0], -1)
        for width in self.hidden[2:]:
            x = EndOfBlock()(nn.relu(Dense(width)(x)))
        return Dense(self.num_classes, name="classifier")(x)
