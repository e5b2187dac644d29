"""Networks: sizes, PyTorch's initialisation, and errors."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_flat as ff
from fedjax_flat import models


@pytest.mark.parametrize(
    ("name", "classes", "expected"),
    [
        ("cnn", 10, 797_962), ("cnn", 100, 815_332),
        ("resnet18", 10, 11_173_962), ("resnet18", 100, 11_220_132),
    ],
)
def test_models_have_the_papers_number_of_parameters(name, classes, expected):
    model = models.build(name, num_classes=classes, inputs=(32, 32, 3))
    assert models.num_parameters(jax.eval_shape(model.init, jax.random.key(0))) == expected


def test_initialisation_is_pytorchs():
    """Weights and biases are uniform on +-1/sqrt(fan_in)."""
    model = models.build("cnn", num_classes=10, inputs=(32, 32, 3))
    variables = jax.jit(model.init)(jax.random.key(0))
    params = variables.params
    fan_in = {"Conv_0": 75, "Conv_1": 1600, "Dense_0": 1600, "Dense_1": 384, "classifier": 192}
    assert set(params) == set(fan_in)
    for name, n in fan_in.items():
        bound = 1 / np.sqrt(n)
        for leaf in params[name].values():
            assert np.abs(leaf).max() <= bound
        kernel = np.asarray(params[name]["kernel"])
        assert np.abs(kernel).max() > 0.98 * bound
        assert kernel.var() == pytest.approx(bound**2 / 3, rel=0.1)
    bias = np.asarray(params["Dense_0"]["bias"])
    assert bias.var() == pytest.approx(1 / 1600 / 3, rel=0.2)


def test_cnn_equals_plain_flax():
    """The same parameters in nn.Conv, nn.Dense and nn.max_pool give the same logits."""

    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(2):
                x = nn.Conv(64, (5, 5), padding="VALID", name=f"Conv_{i}")(x)
                x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
            x = x.reshape(len(x), -1)
            for i, width in enumerate((384, 192)):
                x = nn.relu(nn.Dense(width, name=f"Dense_{i}")(x))
            return nn.Dense(10, name="classifier")(x)

    model = models.build("cnn", num_classes=10, inputs=(32, 32, 3))
    variables = jax.jit(model.init)(jax.random.key(0))
    params = variables.params
    images = jax.random.normal(jax.random.key(1), (3, 32, 32, 3))
    with jax.numpy_rank_promotion("allow"):
        expected = Plain().apply({"params": params}, images)
    logits = model.apply(variables, images).logits
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_resnet_equals_plain_flax():
    """The same parameters in nn.Conv, nn.GroupNorm and nn.Dense give the same logits."""

    def normed(i, features, kernel=3, stride=1):
        pad = kernel // 2
        conv = nn.Conv(features, (kernel, kernel), stride, pad, use_bias=False, name=f"Conv_{i}")
        norm = nn.GroupNorm(2, epsilon=1e-5, name=f"GroupNorm_{i}")
        return lambda x: norm(conv(x))

    class Block(nn.Module):
        features: int
        stride: int

        @nn.compact
        def __call__(self, x):
            y = nn.relu(normed(0, self.features, stride=self.stride)(x))
            y = normed(1, self.features)(y)
            if self.stride == 2:
                x = normed(2, self.features, 1, 2)(x)
            return nn.relu(x + y)

    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(normed(0, 64)(x))
            for i in range(8):
                stride = 2 if i in (2, 4, 6) else 1
                x = Block(64 * 2 ** (i // 2), stride, name=f"Block_{i}")(x)
            return nn.Dense(10, name="classifier")(x.mean((1, 2)))

    model = models.build("resnet18", num_classes=10, inputs=(16, 16, 3))
    variables = jax.jit(model.init)(jax.random.key(0))
    params = variables.params
    images = jax.random.normal(jax.random.key(1), (2, 16, 16, 3))
    with jax.numpy_rank_promotion("allow"):
        expected = jax.jit(Plain().apply)({"params": params}, images)
    np.testing.assert_allclose(
        jax.jit(model.apply)(variables, images).logits, expected, rtol=1e-4, atol=1e-5
    )


def test_a_key_switches_training_mode_on():
    class Dropped(nn.Module):
        @nn.compact
        def __call__(self, x, *, train=False):
            return nn.Dropout(0.5, deterministic=not train)(x.reshape(len(x), -1))

    model = models.from_linen(Dropped(), (4, 4, 1))
    images = jnp.ones((1, 4, 4, 1))
    empty = models.Variables({})
    np.testing.assert_array_equal(model.apply(empty, images).logits, np.ones((1, 16)))
    assert set(np.unique(model.apply(empty, images, jax.random.key(0)).logits)) == {0.0, 2.0}


@pytest.mark.parametrize("name", ["cnn", "mlp"])
def test_bfloat16_keeps_float32_parameters_gradients_and_logits(name):
    models_of = lambda p: models.build(name, num_classes=10, inputs=(32, 32, 3), precision=p)
    exact, rounded = models_of("float32"), models_of("bfloat16")
    variables = jax.jit(rounded.init)(jax.random.key(0))
    images = jax.random.normal(jax.random.key(1), (2, 32, 32, 3))
    logits = jax.jit(rounded.apply)(variables, images).logits
    assert logits.dtype == jnp.float32
    gap = np.abs(logits - jax.jit(exact.apply)(variables, images).logits).max()
    assert 0 < gap < 0.01 * np.abs(logits).max() + 0.01
    loss = lambda v: jnp.sum(rounded.apply(v, images).logits ** 2)
    grads = jax.jit(jax.grad(loss))(variables)
    assert {x.dtype for x in jax.tree.leaves((variables, grads))} == {jnp.dtype("float32")}
    jaxpr = str(jax.make_jaxpr(rounded.apply)(variables, images))
    assert "bf16[2," in jaxpr, "layers do compute in bfloat16"


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("resnet", (32, 32, 3), "unknown model 'resnet': expected one of cnn, mlp"),
        ("cnn", (8, 8, 1), r"cannot read inputs of shape \(8, 8, 1\).*larger than the image"),
    ],
)
def test_wrong_inputs(name, shape, message):
    with pytest.raises(ff.UsageError, match=message):
        models.build(name, num_classes=10, inputs=shape)
