"""The three small CNNs that papers train on FEMNIST (28x28 greyscale, 62 classes).

| variant | layers | parameters, 62 classes |
|---|---|---|
| mora | conv 5x5 (32), pool, conv 5x5 (64), pool, 512 | 1,690,046 |
| mcmahan | the same network: McMahan et al. (AISTATS 2017), 1,663,370 for 10 classes | 1,690,046 |
| fedseq | conv 3x3 (32), conv 3x3 (64), pool, dropout 1/4, 128, dropout 1/2 | 1,206,590 |

The first two papers describe one network twice, with 'same' padding, so `mora` and `mcmahan` are
two names of it. FedSeq's text gives no kernel size; 3x3 without padding is that of the public
networks with the same list of layers. ReLU follows every layer but the last.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax

from fedjax_flat.models.layers import Conv, Dense, EndOfBlock

_HIDDEN = {"mora": (32, 64, 512), "fedseq": (32, 64, 128), "mcmahan": (32, 64, 512)}
VARIANTS = tuple(_HIDDEN)


class FemnistCNN(nn.Module):
    """CNNs of 28x28 greyscale letters and digits: Mora's, FedSeq's, McMahan's."""

    num_classes: int
    variant: str = "mora"
    hidden: Sequence[int] = ()  # channels, channels and a dense layer; () is the variant's

    def __post_init__(self):
        self.hidden = self.hidden or _HIDDEN[self.variant]
        super().__post_init__()

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        first, second, last = self.hidden
        drop = lambda rate, x: nn.Dropout(rate, deterministic=not train)(x)
        if self.variant == "fedseq":
            x = EndOfBlock()(nn.relu(Conv(first, (3, 3))(x)))
            x = EndOfBlock()(drop(0.25, nn.relu(Conv(second, (3, 3), pool=2)(x))))
            x = drop(0.5, nn.relu(Dense(last)(x.reshape(x.shape[0], -1))))
        else:
            for width in (first, second):
                x = EndOfBlock()(nn.relu(Conv(width, (5, 5), padding="SAME", pool=2)(x)))
            x = nn.relu(Dense(last)(x.reshape(x.shape[0], -1)))
        return Dense(self.num_classes, name="classifier")(EndOfBlock()(x))
