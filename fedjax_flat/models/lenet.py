"""A LeNet for greyscale images, for the MNIST study of FedSGD, SCAFFOLD and FedGH.

That study prints no architecture for its "SimpleCNN", so this is LeNet-5 (LeCun et al., "Gradient-
based learning applied to document recognition", 1998) as it is used today: conv 5x5 (6) - pool -
conv 5x5 (16) - pool - 120 - 84 - classes, with ReLU and max pooling in place of tanh and trainable
sub-sampling, and the first convolution padded, so that 28x28 becomes LeNet-5's own 28x28 maps:
61,706 parameters for 10 classes and one channel.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax

from fedjax_flat.models.layers import Conv, Dense, EndOfBlock


class LeNet(nn.Module):
    """LeNet-5 with ReLU and max pooling, for 28x28 greyscale; larger images and colour work too."""

    num_classes: int
    hidden: Sequence[int] = (6, 16, 120, 84)  # channels, channels, and two dense layers

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        del train
        x = EndOfBlock()(nn.relu(Conv(self.hidden[0], (5, 5), padding="SAME", pool=2)(x)))
        x = EndOfBlock()(nn.relu(Conv(self.hidden[1], (5, 5), pool=2)(x)))
        x = x.reshape(x.shape[0], -1)
        for width in self.hidden[2:]:
            x = EndOfBlock()(nn.relu(Dense(width)(x)))
        return Dense(self.num_classes, name="classifier")(x)
