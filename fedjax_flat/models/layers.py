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


def _floating(x: jax.Array) -> jax.Array:
    """Whole numbers as float32: weights of their type would all be 0."""
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)


def uniform(fan_in: int):
    """An initialiser, U(-1/sqrt(fan_in), 1/sqrt(fan_in))."""
    bound = 1 / math.sqrt(fan_in)

    def init(key, shape, dtype=jnp.float32):
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


class Dense(nn.Module):
    """x W + b."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = _floating(x)
        init = uniform(x.shape[-1])
        kernel = self.param("kernel", init, (x.shape[-1], self.features)).astype(x.dtype)
        bias = self.param("bias", init, (self.features,)).astype(x.dtype)
        return ops.product(x, kernel) + bias.reshape((1,) * (x.ndim - 1) + (-1,))


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
        x = _floating(x)
        shape = (*self.kernel_size, x.shape[-1] // self.feature_group_count, self.features)
        init = uniform(math.prod(shape[:3]))
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


class EndOfBlock(nn.Module):
    """Where a block of a network ends: what is learned of or done to it there is a method's."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x


class AuxiliaryHead(nn.Module):
    """A base of heads whose logits add to the loss while a network is trained, and are gone then.

    What its `__call__` returns is found in `Outputs.auxiliary`; nothing else need read it.
    """


class Projection(nn.Module):
    """Two layers between the features and the classifier, which then reads what they make of them.

    Li, He, Song, "Model-contrastive federated learning" (CVPR 2021): as wide as the features, ReLU,
    `width`. A network's setting `projection` is the width; 0 leaves the features as they are.
    """

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if not self.width:
            return x
        x = nn.relu(Dense(x.shape[-1])(x))
        return Dense(self.width)(x)


class GroupNorm(nn.Module):
    """Group normalisation of images, with the parameters of `nn.GroupNorm`."""

    groups: int
    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        return ops.group_norm(x, scale, bias, self.groups, self.epsilon)


class BatchNorm(nn.Module):
    """Batch normalisation with PyTorch's running statistics; padding counts in none of them.

    In training, examples are normalised by mean and variance over the real ones of the batch (and
    over the image), and the running values move to them by `momentum`, the variance as n / (n - 1)
    of it. In evaluation, or when the statistics may not move, the running values normalise. What
    touches the image are sums of ops/sums.py and what they are transposes of.
    """

    momentum: float = 0.1
    epsilon: float = 1e-5

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None,
        momentum: float | None = None,
    ) -> jax.Array:
        n, shape = x.shape[0], (x.shape[-1],)
        momentum = self.momentum if momentum is None else momentum
        mean = self.variable("batch_stats", "mean", jnp.zeros, shape, jnp.float32)
        var = self.variable("batch_stats", "var", jnp.ones, shape, jnp.float32)
        scale = self.param("scale", nn.initializers.ones, shape)
        bias = self.param("bias", nn.initializers.zeros, shape)
        values = x.astype(scale.dtype).reshape(n, -1, 1, *shape)
        pixels = values.shape[1]
        spread = lambda v: ops.spread(jnp.broadcast_to(v.reshape(1, -1), (n, *shape)), (pixels, 1))
        if train and self.is_mutable_collection("batch_stats"):
            real = jnp.ones(n, bool) if mask is None else mask
            count = (jnp.sum(real, dtype=jnp.int32) * pixels).astype(scale.dtype)
            over = lambda sums: (  # of all real examples, from each one's sums over its image
                jnp.sum(jnp.where(real.reshape(n, 1), sums, 0), axis=0) / jnp.maximum(count, 1)
            )
            centre = over(ops.total(values))
            values = values - spread(centre)
            variance = over(ops.inner(values, values))
            if not self.is_initializing():
                move = jnp.where(count > 0, momentum, 0.0).astype(jnp.float32)
                unbiased = variance * count / jnp.maximum(count - 1, 1)
                mean.value += move * (centre.astype(jnp.float32) - mean.value)
                var.value += move * (unbiased.astype(jnp.float32) - var.value)
        else:
            values = values - spread(mean.value.astype(scale.dtype))
            variance = var.value.astype(scale.dtype)
        factor = scale * jax.lax.rsqrt(variance + self.epsilon)
        return (values * spread(factor) + spread(bias)).reshape(x.shape).astype(x.dtype)


def normalise(
    x: jax.Array, norm: str, *, train: bool, mask: jax.Array | None, groups: int = 2,
    epsilon: float = 1e-5,
) -> jax.Array:
    """The layer that a model's setting `norm` names: group, batch, or none."""
    if norm == "group":
        return GroupNorm(groups, epsilon)(x)
    if norm == "batch":
        return BatchNorm(epsilon=epsilon)(x, train=train, mask=mask)
    return x
