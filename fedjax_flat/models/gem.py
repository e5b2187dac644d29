"""Networks that end in generalised-mean pooling: embeddings for retrieval.

    GeM(x)_c = (mean over positions of max(x_c, epsilon)^p)^(1/p)       p learned, 3 at first

Radenović, Tolias, Chum, "Fine-tuning CNN image retrieval with no human annotation" (TPAMI 2019): p
= 1 is the mean, p -> infinity the maximum. Computed through logarithms, so that no power overflows.

`ResNet18GeM` is FedVPR's network (Dutto et al., CVPRW 2024): ResNet-18 up to its third stage, then
GeM. `stem` = small is that of resnet.py for small images; large, for photographs, the 7x7
convolution of stride 2 and 3x3 max pooling of stride 2 of He et al. (CVPR 2016). `MobileNetV2GeM`
is MobileNetV2 (mobile.py) with GeM in the place of its mean; pretrained files fit it, and p is
fresh. What follows GeM, `embedding` > 0, is a linear layer of that width, the model's `classifier`;
without one an embedding is as wide as the last maps. Neither knows classes.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_flat.models.layers import Conv, Dense, normalise
from fedjax_flat.models.mobile import MobileTrunk
from fedjax_flat.models.resnet import ResNetTrunk

EPSILON = 1e-6


class GeM(nn.Module):
    """Generalised-mean pooling of maps (N, H, W, C), to (N, C); one p for all channels."""

    p: float = 3.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        p = self.param("p", nn.initializers.constant(self.p), ())
        values = jnp.log(jnp.maximum(x.astype(p.dtype), EPSILON))
        count = jnp.asarray(x.shape[1] * x.shape[2], p.dtype)
        total = jax.nn.logsumexp(p * values, axis=(1, 2))
        return jnp.exp((total - jnp.log(count)) / p).astype(x.dtype)


class ResNet18GeM(ResNetTrunk):
    """ResNet-18 truncated after its third stage, then GeM; the first has so many `channels`."""

    num_classes: int = 0
    channels: int = 64
    embedding: int = 0
    p: float = 3.0
    stem: str = "small"

    @property
    def stages(self) -> Sequence[int]:
        return (self.channels, 2 * self.channels, 4 * self.channels)

    def _stem(self, x, **mode):
        if self.stem == "small":
            return super()._stem(x, **mode)
        x = Conv(self.channels, (7, 7), (2, 2), ((3, 3), (3, 3)), use_bias=False)(x)
        x = nn.relu(normalise(x, self.norm, groups=self.groups, **mode))
        return nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None
    ) -> jax.Array:
        return _embedded(self._maps(x, train=train, mask=mask), self.p, self.embedding)


class MobileNetV2GeM(MobileTrunk):
    """MobileNetV2 1.0 with GeM in the place of the mean."""

    num_classes: int = 0
    embedding: int = 0
    p: float = 3.0

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None
    ) -> jax.Array:
        return _embedded(self._maps(x, train=train, mask=mask), self.p, self.embedding)


def _embedded(x: Any, p: float, width: int) -> jax.Array:
    x = GeM(p, name="gem")(x)
    return Dense(width, name="classifier")(x) if width else x
