"""Group normalisation: flax's values, and derivatives of the textbook form in float64."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_flat as ff
from fedjax_flat import ops


def textbook(x, scale, bias, groups):
    n, h, w, c = x.shape
    y = x.reshape(n, h, w, groups, c // groups)
    mean = y.mean((1, 2, 4), keepdims=True)
    var = jnp.square(y - mean).mean((1, 2, 4), keepdims=True)
    y = ((y - mean) / jnp.sqrt(var + 1e-5)).reshape(x.shape)
    return y * scale.reshape(1, 1, 1, c) + bias.reshape(1, 1, 1, c)


@pytest.mark.parametrize(("shape", "groups"), [((3, 5, 4, 8), 2), ((1, 2, 2, 6), 3),
                                               ((2, 7, 7, 4), 1), ((2, 3, 3, 4), 4)])
def test_values_and_derivatives(shape, groups):
    keys = jax.random.split(jax.random.key(0), 6)
    draw = lambda key, s: jax.random.normal(key, s)
    arguments = draw(keys[0], shape), 1 + draw(keys[1], shape[-1:]), draw(keys[2], shape[-1:])
    tangents = tuple(draw(k, a.shape) for k, a in zip(keys[3:], arguments, strict=True))

    def all_of(norm, arguments, tangents):
        loss = lambda *a: jnp.sum(jnp.sin(norm(*a, groups)))
        gradient = jax.grad(loss, (0, 1, 2))
        return (norm(*arguments, groups), gradient(*arguments),
                jax.jvp(gradient, arguments, tangents)[1],
                jax.vmap(lambda s: norm(s * arguments[0], *arguments[1:], groups))(jnp.arange(3.0)))

    ours = jax.jit(lambda a, t: all_of(ops.group_norm, a, t))(arguments, tangents)
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        wide = lambda tree: jax.tree.map(lambda v: jnp.asarray(np.asarray(v), jnp.float64), tree)
        exact = all_of(textbook, wide(arguments), wide(tangents))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5 * max(1.0, float(np.abs(b).max())))


def test_flax_has_the_same_parameters_and_values():
    x = 3 + jax.random.normal(jax.random.key(0), (2, 6, 6, 8))
    ours = ff.models.layers.GroupNorm(2)
    variables = ours.init(jax.random.key(1), x)
    theirs = nn.GroupNorm(2, epsilon=1e-5)
    with jax.numpy_rank_promotion("allow"):
        expected = theirs.apply(variables, x)
    np.testing.assert_allclose(ours.apply(variables, x), expected, atol=2e-5)


def test_bfloat16_sums_in_float32():
    x = 10 + jax.random.normal(jax.random.key(0), (2, 8, 8, 4))
    one, zero = jnp.ones(4), jnp.zeros(4)
    exact = ops.group_norm(x.astype(jnp.bfloat16).astype(jnp.float32), one, zero, 2)
    rounded = ops.group_norm(x.astype(jnp.bfloat16), one, zero, 2)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_allclose(rounded.astype(jnp.float32), exact, atol=0.02)


def test_groups_that_do_not_divide():
    with pytest.raises(ff.UsageError, match="3 groups do not divide 4 channels"):
        ops.group_norm(jnp.ones((1, 2, 2, 4)), jnp.ones(4), jnp.ones(4), 3)
