"""Layers initialised as PyTorch initialises them, so that published hyper-parameters carry over.

PyTorch draws both weight and bias of `Conv2d` and `Linear` from U(-1/sqrt(fan_in),
1/sqrt(fan_in)). Flax's defaults (LeCun normal, zero bias) have three times the variance.
Parameter names and shapes are those of `nn.Dense` and `nn.Conv`. Layers compute in the type of
their input (float32 or bfloat16, sums in float32); parameters stay float32.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_flat import ops


def _uniform(fan_in: int):
    bound = 1 / math.sqrt(fan_in)

    def init(key, shape, dtype=jnp.float32):
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


class Dense(nn.Module):
    """x W + b."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = _uniform(x.shape[-1])
        kernel = self.param("kernel", init, (x.shape[-1], self.features)).astype(x.dtype)
        bias = self.param("bias", init, (self.features,)).astype(x.dtype)
        x = jnp.matmul(x, kernel, preferred_element_type=ops.accumulator(x)).astype(x.dtype)
        return x + bias.reshape((1,) * (x.ndim - 1) + (-1,))


class Conv(nn.Module):
    """Convolution (VALID by default), max pooling if asked, plus bias.

    A bias commutes with max pooling, bit for bit; added afterwards it, and its gradient, touch a
    quarter of the values.
    """

    features: int
    kernel_size: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    padding: str | tuple[tuple[int, int], tuple[int, int]] = "VALID"
    kernel_dilation: tuple[int, int] = (1, 1)
    feature_group_count: int = 1
    use_bias: bool = True
    pool: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (*self.kernel_size, x.shape[-1] // self.feature_group_count, self.features)
        init = _uniform(math.prod(shape[:3]))
        x = ops.conv(
            x,
            self.param("kernel", init, shape).astype(x.dtype),
            strides=self.strides,
            padding=self.padding,
            dilation=self.kernel_dilation,
            groups=self.feature_group_count,
        )
        if self.pool > 1:
            x = ops.max_pool(x, self.pool)
        if self.use_bias:
            bias = self.param("bias", init, (self.features,)).astype(x.dtype)
            x = ops.add_bias(x, bias)
        return x
