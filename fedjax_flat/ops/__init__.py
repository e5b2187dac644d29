"""Operations that stay fast inside compiled loops and under jvp(grad)."""

from fedjax_flat.ops.conv import conv
from fedjax_flat.ops.pooling import max_pool

__all__ = ["conv", "max_pool"]
