"""BiSeNetV2: a wide shallow branch for detail and a narrow deep one for meaning, gating each other.

Yu et al., "BiSeNet V2: bilateral network with guided aggregation for real-time semantic
segmentation" (IJCV 2021). Channels at `width` 1, with the image's size divided by:

    detail     64 64 /2 - 64 64 64 /4 - 128 128 128 /8            3x3 convolutions
    semantic   stem 16 /4 - GE 32 32 /8 - GE 64 64 /16 - GE 128 x4 /32 - CE 128
    aggregate  detail sigma(semantic) + up(down(detail) sigma(semantic)), 3x3
    head       3x3 (1024), classifier 1x1, up to the image

GE, gather and expand: 3x3, depthwise 3x3 to six times the channels, 1x1 back, plus the input; of
stride 2 with a second depthwise 3x3 and a depthwise 3x3 and 1x1 on the shortcut. CE, context: the
mean over the image, normalised and convolved, is added to every pixel. Four auxiliary heads read
what the semantic branch has at /4, /8, /16 and /32 and are gone after training.

BatchNorm follows every convolution but the gates' last ones and the classifiers. Parameters for 19
classes: 3,358,627 (3.4 million in surveys) and 1,872,860 in the heads. Where the paper is silent we
do as its usual public program does: ReLU after the depthwise convolution that widens and after the
aggregation, heads that convolve once more at twice their size. Upsampling is bilinear,
and to the size of what it meets, so that images of any size work; weights are initialised as
PyTorch does, unlike there.

A depthwise convolution to six times the channels is one of the input repeated six times, which our
depthwise convolution is fast for, and a grouped one is not.
"""

import functools
import operator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_flat.models.layers import AuxiliaryHead, BatchNorm, Conv

AROUND = ((1, 1), (1, 1))  # PyTorch's padding=1
EXPANSION = 6


class ConvNorm(nn.Module):
    """Convolution, BatchNorm, ReLU if asked; depthwise with one or more outputs per channel."""

    features: int
    kernel: int = 3
    stride: int = 1
    depthwise: bool = False
    active: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool, mask: jax.Array | None) -> jax.Array:
        if self.depthwise:
            x = jnp.repeat(x, self.features // x.shape[-1], axis=-1)
        x = Conv(
            self.features, (self.kernel, self.kernel), (self.stride, self.stride),
            AROUND if self.kernel == 3 else "VALID", use_bias=False,
            feature_group_count=self.features if self.depthwise else 1,
        )(x)
        x = BatchNorm()(x, train=train, mask=mask)
        return nn.relu(x) if self.active else x


class Stem(nn.Module):
    """A quarter of the image's size, by convolutions and by maxima."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array, **mode) -> jax.Array:
        x = ConvNorm(self.features, stride=2)(x, **mode)
        left = ConvNorm(self.features // 2, 1)(x, **mode)
        left = ConvNorm(self.features, stride=2)(left, **mode)
        right = _windows(x, jnp.maximum, -jnp.inf)
        return ConvNorm(self.features)(jnp.concatenate([left, right], -1), **mode)


class Gather(nn.Module):
    """Gather and expand; of stride 2 at the begin of a stage."""

    features: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array, **mode) -> jax.Array:
        own, wide = x.shape[-1], EXPANSION * x.shape[-1]
        y = ConvNorm(own)(x, **mode)
        if self.stride == 1:
            y = ConvNorm(wide, depthwise=True)(y, **mode)
        else:
            y = ConvNorm(wide, stride=2, depthwise=True, active=False)(y, **mode)
            y = ConvNorm(wide, depthwise=True)(y, **mode)
            x = ConvNorm(own, stride=2, depthwise=True, active=False)(x, **mode)
            x = ConvNorm(self.features, 1, active=False)(x, **mode)
        return nn.relu(x + ConvNorm(self.features, 1, active=False)(y, **mode))


class Context(nn.Module):
    """The mean over the image, added to every pixel."""

    @nn.compact
    def __call__(self, x: jax.Array, **mode) -> jax.Array:
        features = x.shape[-1]
        mean = BatchNorm()(jnp.mean(x, axis=(1, 2), keepdims=True), **mode)
        mean = ConvNorm(features, 1)(mean, **mode)
        return ConvNorm(features)(x + jnp.broadcast_to(mean, x.shape), **mode)


class Aggregate(nn.Module):
    """Detail and meaning, each gated by the other at its own size."""

    @nn.compact
    def __call__(self, detail: jax.Array, semantic: jax.Array, **mode) -> jax.Array:
        features = detail.shape[-1]

        def own(x):
            x = ConvNorm(features, depthwise=True, active=False)(x, **mode)
            return Conv(features, (1, 1), use_bias=False)(x)

        fine = own(detail)
        coarse = ConvNorm(features, stride=2, active=False)(detail, **mode)
        coarse = _windows(coarse, operator.add, 0.0) / 9
        gate = ConvNorm(features, active=False)(semantic, **mode)
        fine = fine * nn.sigmoid(resized(gate, fine))
        coarse = coarse * nn.sigmoid(own(semantic))
        return ConvNorm(features)(fine + resized(coarse, fine), **mode)


class Head(AuxiliaryHead):
    """Logits of every pixel of `image`, of what lies in the semantic branch."""

    num_classes: int
    features: int
    factor: int  # by which the image was made smaller
    width: float
    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, image: jax.Array, **mode) -> jax.Array:
        x = ConvNorm(self.features)(x, **mode)
        x = nn.Dropout(self.dropout, deterministic=not mode["train"])(x)
        x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
        x = ConvNorm(_scaled(self.factor**2, self.width))(x, **mode)
        return resized(Conv(self.num_classes, (1, 1), name="logits")(x), image)


class BiSeNetV2(nn.Module):
    """BiSeNetV2 with BatchNorm; logits of every pixel."""

    num_classes: int
    width: float = 1.0
    auxiliary: bool = True
    dropout: float = 0.1

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None
    ) -> jax.Array:
        image = x
        mode: dict[str, Any] = {"train": train, "mask": mask}
        wide = functools.partial(_scaled, width=self.width)
        detail = x
        for stage, (features, count) in enumerate(((64, 2), (64, 3), (128, 3))):
            for i in range(count):
                name = f"detail_{stage}_{i}"
                detail = ConvNorm(wide(features), stride=1 if i else 2, name=name)(detail, **mode)
        x = Stem(wide(16), name="stem")(x, **mode)
        levels = [x]
        for features, count in ((32, 2), (64, 2), (128, 4)):
            for i in range(count):
                x = Gather(wide(features), 1 if i else 2, name=f"gather_{features}_{i}")(x, **mode)
            levels.append(x)
        x = Aggregate(name="aggregate")(detail, Context(name="context")(x, **mode), **mode)
        x = ConvNorm(wide(1024), name="head")(x, **mode)
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        if self.auxiliary and (train or self.is_initializing()):
            for factor, level in zip((4, 8, 16, 32), levels, strict=True):
                Head(self.num_classes, wide(128), factor, self.width, self.dropout,
                     name=f"auxiliary_{factor}")(level, image, **mode)
        return resized(Conv(self.num_classes, (1, 1), name="classifier")(x), image)


def resized(x: jax.Array, like: jax.Array) -> jax.Array:
    """Bilinear, to the height and width of `like`."""
    return jax.image.resize(x, (x.shape[0], *like.shape[1:3], x.shape[3]), "bilinear")


def _windows(x, join, fill):
    """`join` over 3x3 windows, two pixels apart, of x with one pixel of `fill` around it."""
    for axis in (1, 2):
        pads = [(1, 1, 0) if i == axis else (0, 0, 0) for i in range(4)]
        padded = jax.lax.pad(x, jnp.asarray(fill, x.dtype), pads)
        count = (x.shape[axis] - 1) // 2 + 1
        views = [
            jax.lax.slice_in_dim(padded, i, i + 2 * (count - 1) + 1, 2, axis) for i in range(3)
        ]
        x = functools.reduce(join, views)
    return x


def _scaled(features: int, width: float) -> int:
    """Even, so that the stem can halve it."""
    return max(4, 2 * round(width * features / 2))
