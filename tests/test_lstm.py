"""The LSTM against plain NumPy, in every mode of differentiation, and the language models."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_flat import models, ops
from fedjax_flat.models import lstm
from fedjax_flat.ops import kernels, primitive


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


def everything(f, x, w, u, v):
    """Value and derivatives of every kind; u and v are directions."""
    scale = jnp.arange(1, w.shape[0] + 1, dtype=x.dtype).reshape(1, 1, -1)
    loss = lambda x, w: jnp.sum(jnp.sin(f(x, w) * scale))
    grad = jax.grad(loss, (0, 1))
    along = lambda x, w: sum(jnp.vdot(g, d) for g, d in zip(grad(x, w), (u, v), strict=True))
    return {
        "value": f(x, w),
        "gradient": grad(x, w),
        "forward mode": jax.jvp(loss, (x, w), (u, v))[1],
        "jvp of grad": jax.jvp(grad, (x, w), (u, v))[1],
        "grad of grad": jax.grad(along, (0, 1))(x, w),
        "jvp of jvp": jax.jvp(lambda *a: jax.jvp(loss, a, (u, v))[1], (x, w), (u, v))[1],
        "vmap over both": jax.vmap(grad)(jnp.stack([x, u]), jnp.stack([w, v])),
        "vmap over weights": jax.vmap(grad, (None, 2))(x, jnp.stack([w, v], 2)),
        "vmap over data": jax.vmap(grad, (1, None))(jnp.stack([x, u], 1), w),
        "gradients of a vmap": jax.grad(
            lambda x, w: jnp.sum(jax.vmap(grad, (0, None))(x, w)[1] ** 2)
        )(jnp.stack([x, u]), w),
    }


def arguments(steps, batch, width, dtype):
    keys = jax.random.split(jax.random.key(0), 4)
    draw = lambda key, *shape: jax.random.normal(key, shape, dtype)
    x, u = (draw(k, steps, batch, 4 * width) for k in keys[:2])
    w, v = (draw(k, width, 4 * width) / width**0.5 for k in keys[2:])
    return x, w, u, v


@pytest.mark.parametrize("steps", [1, 5])
def test_derivatives_equal_those_of_the_loop_written_out(x64, steps):
    given = arguments(steps, 2, 3, jnp.float64)
    ours, expected = (
        jax.jit(functools.partial(everything, f))(*given) for f in (ops.lstm, jax_lstm)
    )
    for name, values in expected.items():
        for a, b in zip(jax.tree.leaves(ours[name]), jax.tree.leaves(values), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10, err_msg=name)


@pytest.mark.parametrize(
    ("steps", "batch", "width"),
    [(5, 2, 16), (4, 13, 33), (1, 9, 20), (3, 2, 3), (2, 0, 16)],
)
def test_float32_of_the_kernels_that_are_here(x64, steps, batch, width):
    """Compiled ones take 16 units or more, some of which they compute twice, and bits stay."""
    compiled = kernels.name() != "jax" and width >= 16
    given = arguments(steps, batch, width, jnp.float32)
    ours = jax.jit(functools.partial(everything, ops.lstm))
    text = ours.lower(*given).as_text()
    for loop in ("forward", "linear", "reverse"):
        assert (f"fedjax_flat_lstm_{loop}" in text) == compiled
    found, again = ours(*given), ours(*given)
    wide = jax.tree.map(lambda a: a.astype(jnp.float64), given)
    expected = jax.jit(functools.partial(everything, jax_lstm))(*wide)
    for name, values in expected.items():
        leaves = (jax.tree.leaves(t) for t in (found[name], again[name], values))
        for a, b, c in zip(*leaves, strict=True):
            assert a.dtype == jnp.float32
            np.testing.assert_array_equal(a, b)
            atol = 1e-5 * np.abs(c).max(initial=0)
            np.testing.assert_allclose(a, c, rtol=0, atol=atol, err_msg=name)


def test_the_same_of_compiled_loops():
    """In a process of its own: those of other tests are pure JAX."""
    try:
        kernels._compiled(kernels._find())
    except kernels.Unavailable as e:
        pytest.skip(f"no compiled kernels here: {e}")
    out = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-k", "float32 or full or device", __file__],
        text=True, capture_output=True, check=False,
        env={**os.environ, kernels.SWITCH: "onednn"},
    )
    assert out.returncode == 0, out.stdout[-3000:]
    assert "skipped" not in out.stdout


def test_gates_that_are_full_or_not_numbers():
    x = jnp.zeros((2, 3, 64)).at[:, 0].set(100).at[:, 1].set(-100).at[0, 2, 5].set(jnp.nan)
    h = jax.jit(ops.lstm)(x, jnp.zeros((16, 64)))
    np.testing.assert_allclose(h[1, 0], np.tanh(2), rtol=1e-6)
    np.testing.assert_allclose(h[:, 1], 0, atol=1e-6)
    assert np.isnan(h[:, 2, 5]).all()
    assert np.isfinite(np.delete(h[0, 2], 5)).all()


def test_a_loop_per_device():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("clients",))
    spec = jax.sharding.PartitionSpec
    x, w, _, _ = arguments(3, 2 * len(jax.devices()), 16, jnp.float32)
    grad = lambda x, w: jax.grad(lambda x: jnp.sum(ops.lstm(x, w)))(x)
    split = jax.shard_map(
        grad, mesh=mesh, in_specs=(spec(None, "clients"), spec()),
        out_specs=spec(None, "clients"), check_vma=False,
    )
    np.testing.assert_allclose(jax.jit(split)(x, w), jax.jit(grad)(x, w), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(os.environ.get(primitive.SWITCH) == "lax", reason="no primitives")
def test_no_step_of_the_gradient_touches_the_weights_gradient():
    """It is one product for all steps, outside of the two loops."""
    grad = jax.grad(lambda w, x: jnp.sum(ops.lstm(x, w)))
    text = str(jax.make_jaxpr(grad)(jnp.ones((3, 12)), jnp.ones((9, 2, 12))))
    assert text.count("= lstm_") == 2, "there and back"
    assert text.count("= dot_general") == 1


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
