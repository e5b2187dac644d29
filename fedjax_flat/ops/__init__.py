"""Operations that stay fast inside compiled loops and under jvp(grad).

FEDJAX_FLAT_OPS=lax in the environment makes them plain `lax` operations (see `primitive.py`).
"""

from fedjax_flat.ops.bias import add_bias
from fedjax_flat.ops.conv import conv, conv_general_dilated
from fedjax_flat.ops.group_norm import group_norm
from fedjax_flat.ops.lstm import lstm
from fedjax_flat.ops.pooling import avg_pool, max_pool
from fedjax_flat.ops.primitive import accumulator
from fedjax_flat.ops.product import product
from fedjax_flat.ops.sums import inner, spread, total

__all__ = [
    "accumulator", "add_bias", "avg_pool", "conv", "conv_general_dilated", "group_norm", "inner",
    "lstm", "max_pool", "product", "spread", "total",
]
