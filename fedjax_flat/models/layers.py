"""Layers initialised as PyTorch initialises them, so that published hyper-parameters carry over.

PyTorch draws both weight and bias of `Conv2d` and `Linear` from U(-1/sqrt(fan_in),
1/sqrt(fan_in)). Flax's defaults (LeCun normal, zero bias) have three times the variance.
Parameter names and shapes are those of `nn.Dense` and `nn.Conv`.
"""

import math

import flax.linen as nn
import jax

from fedjax_flat import ops


def _uniform(fan_in: int):
    bound = 1 / math.sqrt(fan_in)

    def init(key, shape, dtype=jax.numpy.float32):
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


class Dense(nn.Module):
    """x W + b."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = _uniform(x.shape[-1])
        kernel = self.param("kernel", init, (x.shape[-1], self.features))
        bias = self.param("bias", init, (self.features,))
        return x @ kernel + bias.reshape((1,) * (x.ndim - 1) + (-1,))


class Conv(nn.Module):
    """VALID convolution plus bias."""

    features: int
    kernel_size: tuple[int, int]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (*self.kernel_size, x.shape[-1], self.features)
        init = _uniform(math.prod(shape[:3]))
        kernel = self.param("kernel", init, shape)
        bias = self.param("bias", init, (self.features,))
        return ops.conv(x, kernel) + bias.reshape(1, 1, 1, -1)
