"""Convolution and pooling against XLA's own, in every mode of differentiation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedjax_flat import ops


def plain(x, w):
    return lax.conv_general_dilated(
        x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@pytest.fixture
def arrays():
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (3, 9, 8, 2))
    w, v = (jax.random.normal(k, (5, 3, 2, 4)) for k in keys[1:3])
    return x, w, v, jax.random.normal(keys[3], x.shape)


def loss(conv, x, w):
    return jnp.sum(jnp.tanh(0.2 * conv(x, w)) ** 2)


def hessian_vector(conv, x, w, v):
    return jax.jvp(jax.grad(lambda w: loss(conv, x, w)), (w,), (v,))[1]


def mixed_second_derivative(conv, x, w, v):
    inner = lambda x: jnp.vdot(jax.grad(lambda w: loss(conv, x, w))(w), v)
    return jax.grad(inner)(x)


@pytest.mark.parametrize(
    "f",
    [
        lambda conv, x, w, v, u: conv(x, w),
        lambda conv, x, w, v, u: jax.grad(lambda w: loss(conv, x, w))(w),
        lambda conv, x, w, v, u: jax.grad(lambda x: loss(conv, x, w))(x),
        lambda conv, x, w, v, u: jax.jvp(lambda x, w: loss(conv, x, w), (x, w), (u, v))[1],
        lambda conv, x, w, v, u: hessian_vector(conv, x, w, v),
        lambda conv, x, w, v, u: mixed_second_derivative(conv, x, w, v),
        lambda conv, x, w, v, u: jax.vmap(lambda w: conv(x, w))(jnp.stack([w, v])),
        lambda conv, x, w, v, u: jax.vmap(lambda x: conv(x, w), 1)(jnp.stack([x, u], 1)),
        lambda conv, x, w, v, u: jax.vmap(lambda w: hessian_vector(conv, x, w, v))(
            jnp.stack([w, v])
        ),
    ],
)
def test_conv_agrees_with_xla(f, arrays):
    np.testing.assert_allclose(
        jax.jit(lambda *a: f(ops.conv, *a))(*arrays),
        jax.jit(lambda *a: f(plain, *a))(*arrays),
        rtol=2e-4,
        atol=2e-4,
    )


@pytest.mark.parametrize("shape", [(2, 6, 6, 3), (2, 7, 5, 3)])
def test_max_pool_agrees_with_reduce_window(shape):
    x = jax.random.normal(jax.random.key(0), shape)
    window = lambda x: lax.reduce_window(
        x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
    )
    np.testing.assert_array_equal(ops.max_pool(x), window(x))
    grad = lambda pool: jax.grad(lambda x: jnp.sum(jnp.sin(pool(x))))(x)
    np.testing.assert_allclose(grad(ops.max_pool), grad(window), rtol=1e-6)


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        ((1, 8, 8, 3), (3, 3, 4, 2), r"\(N, H, W, C\) with \(h, w, C, O\)"),
        ((8, 8, 3), (3, 3, 3, 2), "images of shape"),
        ((1, 4, 4, 3), (5, 5, 3, 2), "larger than images"),
    ],
)
def test_wrong_shapes(x, w, message):
    with pytest.raises(ValueError, match=message):
        ops.conv(jnp.zeros(x), jnp.zeros(w))
