"""MobileNetV2 1.0 and EfficientNet-Lite0: networks of inverted residual blocks.

A block of ratio t: 1x1 convolution to t times the channels (none where t = 1), k x k depthwise
convolution with the block's stride, 1x1 convolution to the block's channels; plus its input where
the shapes agree. A layer that normalises follows every convolution, ReLU6 all but a block's last.
Around the blocks: 3x3 stem of stride 2 (32), 1x1 head (1280), mean over the image, dropout,
classifier. Padding is "SAME", so that images of any size from 32 pixels on work.

| network | extractor's parameters | normalised by |
|---|---|---|
| MobileNetV2 (Sandler et al., CVPR 2018) | 2,223,872 | GroupNorm of 8, epsilon 1e-6 (Fed3R) |
| EfficientNet-Lite0 (Tan and Le, ICML 2019, mobile form) | 3,371,008 | BatchNorm, epsilon 1e-3 |

norm="none" has biases instead: batch normalisation that was folded into the convolutions, as in
files of pretrained weights (pretrained.py). From random weights it hardly trains. The released
network of Fed3R drops whole blocks too (drop-path), which its text does not mention; here none.
"""

from typing import ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_flat.models.layers import Conv, Dense, EndOfBlock, normalise


class Stage(NamedTuple):
    """Blocks in sequence; the first of them has the stride."""

    ratio: int
    features: int
    blocks: int
    stride: int
    kernel: int = 3


MOBILENETV2 = (
    Stage(1, 16, 1, 1), Stage(6, 24, 2, 2), Stage(6, 32, 3, 2), Stage(6, 64, 4, 2),
    Stage(6, 96, 3, 1), Stage(6, 160, 3, 2), Stage(6, 320, 1, 1),
)
EFFICIENTNET_LITE0 = (
    Stage(1, 16, 1, 1), Stage(6, 24, 2, 2), Stage(6, 40, 2, 2, 5), Stage(6, 80, 3, 2),
    Stage(6, 112, 3, 1, 5), Stage(6, 192, 4, 2, 5), Stage(6, 320, 1, 1),
)


class Norm(NamedTuple):
    """What follows each convolution."""

    name: str  # group | batch | none
    groups: int
    epsilon: float


class ConvNorm(nn.Module):
    """Convolution, normalisation or bias, ReLU6 if asked."""

    norm: Norm
    features: int
    kernel: int = 1
    stride: int = 1
    depthwise: bool = False
    active: bool = True
    dilation: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool, mask: jax.Array | None) -> jax.Array:
        x = Conv(
            self.features, (self.kernel, self.kernel), (self.stride, self.stride), "SAME",
            kernel_dilation=(self.dilation, self.dilation),
            feature_group_count=self.features if self.depthwise else 1,
            use_bias=self.norm.name == "none",
        )(x)
        x = normalise(
            x, self.norm.name, train=train, mask=mask, groups=self.norm.groups,
            epsilon=self.norm.epsilon,
        )
        return nn.relu6(x) if self.active else x


class Inverted(nn.Module):
    """An inverted residual block."""

    norm: Norm
    ratio: int
    features: int
    kernel: int
    stride: int
    dilation: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool, mask: jax.Array | None) -> jax.Array:
        wide, y = self.ratio * x.shape[-1], x
        if self.ratio > 1:
            y = ConvNorm(self.norm, wide, name="expand")(y, train=train, mask=mask)
        y = ConvNorm(
            self.norm, wide, self.kernel, self.stride, depthwise=True, dilation=self.dilation,
            name="dw",
        )(y, train=train, mask=mask)
        y = ConvNorm(self.norm, self.features, active=False, name="project")(
            y, train=train, mask=mask
        )
        return x + y if x.shape == y.shape else y


class MobileTrunk(nn.Module):
    """Stem, blocks and head, up to the last maps."""

    norm: str = "group"
    groups: int = 8

    stages: ClassVar = MOBILENETV2
    epsilons: ClassVar = {"group": 1e-6, "batch": 1e-5, "none": 0.0}

    def _maps(self, x, *, train, mask):
        norm = Norm(self.norm, self.groups, self.epsilons[self.norm])
        x = ConvNorm(norm, 32, 3, 2, name="stem")(x, train=train, mask=mask)
        block = 0
        for stage in self.stages:
            for i in range(stage.blocks):
                block += 1
                x = Inverted(
                    norm, stage.ratio, stage.features, stage.kernel, 1 if i else stage.stride,
                    name=f"b{block:02d}",
                )(x, train=train, mask=mask)
            x = EndOfBlock()(x)
        return ConvNorm(norm, 1280, name="head")(x, train=train, mask=mask)


class _Mobile(MobileTrunk):
    num_classes: int = 10
    dropout: float = 0.0

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None
    ) -> jax.Array:
        x = self._maps(x, train=train, mask=mask)
        x = nn.Dropout(self.dropout, deterministic=not train)(jnp.mean(x, axis=(1, 2)))
        return Dense(self.num_classes, name="classifier")(x)


class MobileNetV2(_Mobile):
    """MobileNetV2 1.0, normalised by groups, by batch, or folded; ImageNet weights if asked."""


class EfficientNetLite0(_Mobile):
    """EfficientNet-Lite0, normalised by batch, by groups, or folded; ImageNet weights if asked."""

    norm: str = "batch"

    stages: ClassVar = EFFICIENTNET_LITE0
    epsilons: ClassVar = {"group": 1e-3, "batch": 1e-3, "none": 0.0}
