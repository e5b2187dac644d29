"""A multi-layer perceptron with ReLU, for the embedded digits, for tables and for tests."""

from collections.abc import Sequence

import flax.linen as nn
import jax

from fedjax_flat.models.layers import BatchNorm, Dense, EndOfBlock, Projection


class MLP(nn.Module):
    """Flatten, then one ReLU layer per entry of `hidden`, normalised if asked, then the last."""

    num_classes: int
    hidden: Sequence[int] = (64,)
    norm: str = "none"  # none | batch
    projection: int = 0

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None
    ) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        for width in self.hidden:
            x = Dense(width)(x)
            if self.norm == "batch":
                x = BatchNorm()(x, train=train, mask=mask)
            x = EndOfBlock()(nn.relu(x))
        return Dense(self.num_classes, name="classifier")(Projection(self.projection)(x))
