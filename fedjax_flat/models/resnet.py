"""Residual networks for small images: ResNet-18 of the FedGloSS paper, ResNet-20 of WIMA's.

ResNet-18: 3x3 stem (64) - four stages of two blocks (64, 128, 256, 512 channels, halving the image
from the second on) - mean over the image - classes: 11,173,962 parameters for 10 classes,
11,220,132 for 100. Where the shape changes, the shortcut is a normalised 1x1 convolution.

ResNet-20 (He et al., "Deep residual learning for image recognition", CVPR 2016, section 4.2): stem
(16) - three stages of three blocks (16, 32, 64) - mean - classes: 269,722 parameters for 10
classes, 275,572 for 100. Its shortcuts have no parameters: every second pixel, and zeros for the
channels that the input lacks (option A of that paper, which uses it for its CIFAR networks).

GroupNorm follows every convolution, of two groups as in FedGloSS; WIMA's text gives no number.
`norm="batch"` puts BatchNorm in its place, with as many parameters.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_flat.models.layers import Conv, Dense, EndOfBlock, Projection, normalise

AROUND = ((1, 1), (1, 1))  # PyTorch's padding=1, which differs from SAME under strides


class _Normed(nn.Module):
    """What blocks and networks share: a convolution and the layer that normalises it."""

    norm: str = "group"
    groups: int = 2

    def _conv(self, x, features, *, train, mask, size=3, stride=1):
        padding = AROUND if size == 3 else "VALID"
        x = Conv(features, (size, size), (stride, stride), padding, use_bias=False)(x)
        return normalise(x, self.norm, train=train, mask=mask, groups=self.groups)


class Block(_Normed):
    """Two 3x3 convolutions and a shortcut, which is 1x1 or padding where the shape changes."""

    features: int = 64
    stride: int = 1
    shortcut: str = "conv"  # conv | pad

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool, mask: jax.Array | None) -> jax.Array:
        mode = {"train": train, "mask": mask}
        y = nn.relu(self._conv(x, self.features, stride=self.stride, **mode))
        y = self._conv(y, self.features, **mode)
        if x.shape != y.shape and self.shortcut == "conv":
            x = self._conv(x, self.features, size=1, stride=self.stride, **mode)
        elif x.shape != y.shape:
            lacks = self.features - x.shape[-1]
            x = x[:, :: self.stride, :: self.stride]
            x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (lacks // 2, lacks - lacks // 2)))
        return nn.relu(x + y)


class ResNetTrunk(_Normed):
    """Stem and stages, up to the last maps."""

    blocks: int = 2
    shortcut: str = "conv"

    @property
    def stages(self) -> Sequence[int]:
        """Channels of each."""
        raise NotImplementedError

    def _stem(self, x, **mode):
        return nn.relu(self._conv(x, self.stages[0], **mode))

    def _maps(self, x, *, train, mask):
        mode: Any = {"train": train, "mask": mask}
        x = EndOfBlock()(self._stem(x, **mode))
        for stage, features in enumerate(self.stages):
            for i in range(self.blocks):
                stride = 2 if stage and i == 0 else 1
                x = Block(self.norm, self.groups, features, stride, self.shortcut)(x, **mode)
            x = EndOfBlock()(x)
        return x


class _ResNet(ResNetTrunk):
    num_classes: int = 10
    widths: Sequence[int] = ()
    projection: int = 0

    @property
    def stages(self) -> Sequence[int]:
        return self.widths

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None
    ) -> jax.Array:
        x = self._maps(x, train=train, mask=mask)
        x = Projection(self.projection)(jnp.mean(x, axis=(1, 2)))
        return Dense(self.num_classes, name="classifier")(x)


class ResNet18(_ResNet):
    """ResNet-18 for small images, normalised by groups or by batch."""

    widths: Sequence[int] = (64, 128, 256, 512)


class ResNet20(_ResNet):
    """ResNet-20 for CIFAR, normalised by groups or by batch."""

    widths: Sequence[int] = (16, 32, 64)
    blocks: int = 3
    shortcut: str = "pad"
