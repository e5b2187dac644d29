"""DeepLabV3 on MobileNetV2: dilated convolutions in place of the last stride, then a pyramid.

Chen et al., "Rethinking atrous convolution for semantic image segmentation" (2017), on the
extractor of Sandler et al. (CVPR 2018), as LADD has it. The extractor's last stage keeps its size
and is dilated by 2 (output stride 16); then five branches side by side,

    1x1,  3x3 dilated by 6, 12 and 18,  and the mean over the image through 1x1,     256 each

joined by 1x1 (256, dropout), 3x3 (256), classifier 1x1, up to the image. BatchNorm follows every
convolution. Parameters for 21 classes: 5,113,877.

Weights of MobileNetV2 are read from the files that models/pretrained.py knows; with folded ones
(`norm` = none) the extractor has biases, and what follows it BatchNorm still.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_flat.models.bisenet import resized
from fedjax_flat.models.layers import Conv, EndOfBlock
from fedjax_flat.models.mobile import MOBILENETV2, ConvNorm, Inverted, Norm, Stage

RATES = (6, 12, 18)
OUTPUT_STRIDE = 16


class Pyramid(nn.Module):
    """Branches of several fields of view, joined."""

    norm: Norm
    features: int
    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool, mask: jax.Array | None) -> jax.Array:
        mode: dict[str, Any] = {"train": train, "mask": mask}
        make = lambda name, **options: ConvNorm(self.norm, self.features, name=name, **options)
        branches = [make("point")(x, **mode)]
        for rate in RATES:
            branches.append(make(f"rate_{rate}", kernel=3, dilation=rate)(x, **mode))
        mean = make("image")(jnp.mean(x, axis=(1, 2), keepdims=True), **mode)
        branches.append(jnp.broadcast_to(mean, branches[0].shape))
        x = make("join")(jnp.concatenate(branches, -1), **mode)
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return make("last", kernel=3)(x, **mode)


class DeepLabV3(nn.Module):
    """DeepLabV3 with MobileNetV2; logits of every pixel."""

    num_classes: int
    norm: str = "batch"
    groups: int = 8
    dropout: float = 0.1
    features: int = 256
    stages: tuple[Stage, ...] = MOBILENETV2

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None
    ) -> jax.Array:
        image = x
        mode: dict[str, Any] = {"train": train, "mask": mask}
        norm = Norm(self.norm, self.groups, 1e-5)
        x = ConvNorm(norm, 32, 3, 2, name="stem")(x, **mode)
        block, size, dilation = 0, 2, 1
        for stage in self.stages:
            stride, before = stage.stride, dilation
            if size * stride > OUTPUT_STRIDE:
                dilation, stride = dilation * stride, 1
            size *= stride
            for i in range(stage.blocks):
                block += 1
                x = Inverted(
                    norm, stage.ratio, stage.features, stage.kernel, 1 if i else stride,
                    dilation if i else before, name=f"b{block:02d}",
                )(x, **mode)
            x = EndOfBlock()(x)
        after = norm if self.norm != "none" else Norm("batch", self.groups, 1e-5)
        x = Pyramid(after, self.features, self.dropout, name="decoder")(x, **mode)
        return resized(Conv(self.num_classes, (1, 1), name="classifier")(x), image)
