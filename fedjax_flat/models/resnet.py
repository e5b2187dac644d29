"""ResNet-18 for small images with GroupNorm, as in the FedGloSS paper.

3x3 stem (64) - four stages of two blocks (64, 128, 256, 512 channels, halving the image from the
second on) - mean over the image - classes. GroupNorm of two groups follows every convolution:
11,173,962 parameters for 10 classes, 11,220,132 for 100.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_flat.models.layers import Conv, Dense, GroupNorm

GROUPS = 2
AROUND = ((1, 1), (1, 1))  # PyTorch's padding=1, which differs from SAME under strides


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is 1x1 where the shape changes."""

    features: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        strides = (self.stride, self.stride)
        y = nn.relu(_normed(x, self.features, strides))
        y = _normed(y, self.features)
        if x.shape != y.shape:
            x = Conv(self.features, (1, 1), strides, use_bias=False)(x)
            x = _norm(x)
        return nn.relu(x + y)


class ResNet18(nn.Module):
    """For images whose sides are multiples of 8."""

    num_classes: int

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        del train
        x = nn.relu(_normed(x, 64))
        for stage, features in enumerate((64, 128, 256, 512)):
            x = Block(features, 1 if stage == 0 else 2)(x)
            x = Block(features)(x)
        return Dense(self.num_classes, name="classifier")(jnp.mean(x, axis=(1, 2)))


def _normed(x: jax.Array, features: int, strides: tuple[int, int] = (1, 1)) -> jax.Array:
    return _norm(Conv(features, (3, 3), strides, AROUND, use_bias=False)(x))


def _norm(x: jax.Array) -> jax.Array:
    return GroupNorm(GROUPS)(x)
