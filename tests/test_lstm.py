"""The LSTM against plain NumPy, in every mode of differentiation, and the language models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_flat import models, ops
from fedjax_flat.models import lstm


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def numpy_lstm(x, kernel, recurrent, bias):
    """States (batch, time, width), one example and one step at a time."""
    width = len(recurrent)
    out = np.zeros((*x.shape[:2], width))
    for n, sequence in enumerate(x):
        h, c = np.zeros(width), np.zeros(width)
        for t, values in enumerate(sequence):
            a = values @ kernel + h @ recurrent + bias
            i, f, g, o = (a[k * width : (k + 1) * width] for k in range(4))
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            h = sigmoid(o) * np.tanh(c)
            out[n, t] = h
    return out


def jax_lstm(x, w):
    """The same loop written out, for JAX to differentiate."""
    width, out = w.shape[0], []
    h = c = jnp.zeros((x.shape[1], width), x.dtype)
    for a in x:
        i, f, g, o = jnp.split(a + h @ w, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        out.append(h)
    return jnp.stack(out)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def test_layer_equals_numpy(x64):
    layer = lstm.LSTM(5)
    x = np.random.default_rng(0).normal(size=(3, 7, 4))
    params = layer.init(jax.random.key(0), jnp.zeros(x.shape, jnp.float32))["params"]
    params = jax.tree.map(lambda p: 2 * p.astype(jnp.float64), params)
    kernel, recurrent, *biases = (
        np.asarray(params[n]) for n in ("kernel", "recurrent_kernel", "bias", "recurrent_bias")
    )
    expected = numpy_lstm(x, kernel, recurrent, biases[0] + biases[1])
    ours = layer.apply({"params": params}, jnp.asarray(x))
    np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 5])
def test_derivatives_equal_those_of_the_loop_written_out(x64, steps):
    keys = jax.random.split(jax.random.key(0), 4)
    draw = lambda key, *shape: jax.random.normal(key, shape, jnp.float64)
    x, u = (draw(k, steps, 2, 12) for k in keys[:2])
    w, v = (draw(k, 3, 12) for k in keys[2:])

    def everything(f):
        loss = lambda x, w: jnp.sum(jnp.sin(f(x, w) * jnp.arange(1.0, 4).reshape(1, 1, 3)))
        grad = jax.grad(loss, (0, 1))
        return {
            "value": f(x, w),
            "gradient": grad(x, w),
            "forward mode": jax.jvp(loss, (x, w), (u, v))[1],
            "jvp of grad": jax.jvp(grad, (x, w), (u, v))[1],
            "vmap over both": jax.vmap(grad)(jnp.stack([x, u]), jnp.stack([w, v])),
            "vmap over weights": jax.vmap(grad, (None, 2))(x, jnp.stack([w, v], 2)),
        }

    ours, expected = (jax.jit(lambda f=f: everything(f))() for f in (ops.lstm, jax_lstm))
    for name, values in expected.items():
        for a, b in zip(jax.tree.leaves(ours[name]), jax.tree.leaves(values), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10, err_msg=name)


def test_no_step_of_the_gradient_touches_the_weights_gradient():
    """It is one product for all steps: no loop carries an array of its shape."""
    grad = jax.grad(lambda w, x: jnp.sum(ops.lstm(x, w)))
    text = str(jax.make_jaxpr(grad)(jnp.ones((3, 12)), jnp.ones((9, 2, 12))))
    loops = text.split("scan[")[1:]
    assert len(loops) == 2
    carried = [line for line in text.splitlines() if "= scan[" in line]
    assert carried
    assert not any("f32[3,12]" in line.split("= scan[")[0] for line in carried)


def test_initialisation_is_pytorchs():
    params = lstm.LSTM(16).init(jax.random.key(0), jnp.zeros((1, 2, 4)))["params"]
    assert {n: p.shape for n, p in params.items()} == {
        "kernel": (4, 64), "recurrent_kernel": (16, 64), "bias": (64,), "recurrent_bias": (64,),
    }
    for leaf in params.values():
        assert 0.9 / 4 < np.abs(leaf).max() <= 1 / 4
    assert np.abs(params["bias"] - params["recurrent_bias"]).max() > 0.1


def small(**options):
    inputs = jax.ShapeDtypeStruct((1, 6), jnp.int32)
    return models.build("shakespeare_lstm", num_classes=11, inputs=inputs, **options)


def test_a_language_model_sees_only_what_came_before():
    model = small()
    variables = jax.jit(model.init)(jax.random.key(0))
    tokens = jnp.array([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 0, 1]])
    apply = jax.jit(model.apply)
    outputs = apply(variables, tokens)
    assert outputs.logits.shape == (2, 6, 11)
    assert outputs.features.shape == (2, 6, 100)
    changed = apply(variables, tokens.at[0, 3].set(0)).logits
    differs = np.any(np.asarray(changed != outputs.logits), axis=-1)
    np.testing.assert_array_equal(differs, [[False] * 3 + [True] * 3, [False] * 6])


def test_a_token_outside_the_vocabulary_is_not_a_number():
    embedding = lstm.Embedding(3, 2)
    tokens = jnp.array([[0, 2, 3]])
    variables = embedding.init(jax.random.key(0), tokens)
    found = np.isnan(embedding.apply(variables, tokens)).all(-1)
    np.testing.assert_array_equal(found, [[False, False, True]])
