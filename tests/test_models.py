"""Networks: sizes, PyTorch's initialisation, and errors."""

from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_flat as ff
from fedjax_flat import models
from fedjax_flat.models import mobile, resnet

COLOUR, GREY = (32, 32, 3), (28, 28, 1)
TOKENS = jax.ShapeDtypeStruct((1, 5), jnp.int32)
EXTRACTOR = 1280 * 10 + 10  # less than this, which is the classifier's
LSTM = lambda inputs, width: 4 * width * (inputs + width + 2)  # weights, weights, two biases


def shapes(name, classes=10, inputs=COLOUR, **options):
    model = models.build(name, num_classes=classes, inputs=inputs, **options)
    return jax.eval_shape(model.init, jax.random.key(0))


@pytest.mark.parametrize(
    ("name", "classes", "inputs", "options", "expected"),
    [
        ("cnn", 10, COLOUR, {}, 797_962),
        ("cnn", 100, COLOUR, {}, 815_332),
        ("lenet", 10, GREY, {}, 156 + 2_416 + 48_120 + 10_164 + 850),
        ("femnist_cnn", 62, GREY, {}, 1_690_046),
        ("femnist_cnn", 10, GREY, {"variant": "mcmahan"}, 1_663_370),
        ("femnist_cnn", 62, GREY, {"variant": "fedseq"}, 320 + 18_496 + 1_179_776 + 7_998),
        ("resnet18", 10, COLOUR, {}, 11_173_962),
        ("resnet18", 100, COLOUR, {}, 11_220_132),
        ("resnet18", 100, COLOUR, {"norm": "batch"}, 11_220_132),
        # without the fourth stage and the classifier, with one p
        ("resnet18_gem", 0, COLOUR, {}, 11_173_962 - 513 * 10 - 256 * 512 - 9 * 256 * 512
         - 3 * 9 * 512**2 - 5 * 1024 + 1),
        ("mobilenetv2_gem", 0, COLOUR, {"embedding": 10}, 2_223_872 + 1 + EXTRACTOR),
        # stem, then 9 c^2 + 2 c per convolution, half of it for the first of a stage
        ("resnet20", 10, COLOUR, {}, 9 * 3 * 16 + 32 + 6 * (2304 + 32) + 4608 + 5 * 9216 + 6 * 64
         + 18432 + 5 * 36864 + 6 * 128 + 650),
        ("resnet20", 100, COLOUR, {"norm": "batch"}, 275_572),
        ("mobilenetv2", 10, COLOUR, {}, 2_223_872 + EXTRACTOR),
        ("mobilenetv2", 10, COLOUR, {"norm": "batch"}, 2_223_872 + EXTRACTOR),
        # one bias per channel, 17,056 of them, in place of two parameters
        ("mobilenetv2", 10, COLOUR, {"norm": "none"}, 2_223_872 - 17_056 + EXTRACTOR),
        ("bisenetv2", 19, COLOUR, {"auxiliary": False}, 3_358_627),  # 3.4 million in surveys
        ("bisenetv2", 19, COLOUR, {}, 3_358_627 + 1_872_860),
        # MobileNetV2 without head and classifier, pyramid, 3x3, classifier
        ("deeplabv3", 21, COLOUR, {}, 2_223_872 - 320 * 1280 - 2560 + 2 * (320 * 256 + 512)
         + 3 * (9 * 320 * 256 + 512) + 1280 * 256 + 512 + 9 * 256**2 + 512 + 257 * 21),
        ("efficientnet_lite0", 1000, COLOUR, {}, 4_652_008),
        ("efficientnet_lite0", 1000, COLOUR, {"norm": "group"}, 4_652_008),
        ("shakespeare_lstm", 90, TOKENS, {}, 90 * 8 + LSTM(8, 100) + LSTM(100, 100) + 9_090),
        ("stackoverflow_lstm", 10_004, TOKENS, {},
         10_004 * 96 + LSTM(96, 670) + 671 * 96 + 97 * 10_004),
        ("stackoverflow_lstm", 10_004, TOKENS, {}, 4_050_748 + 4 * 670),  # Keras has one bias
    ],
)
def test_models_have_the_papers_number_of_parameters(name, classes, inputs, options, expected):
    assert models.num_parameters(shapes(name, classes, inputs, **options).params) == expected


# The smallest inputs that a registered model reads; images of 8x8x1 unless it stands here.
SMALLEST = {
    "cnn": (16, 16, 3), "lenet": GREY, "femnist_cnn": GREY, "shakespeare_lstm": TOKENS,
    "stackoverflow_lstm": TOKENS,
}


@pytest.mark.parametrize("width", [0.05, 0.1, 0.5])
def test_a_narrow_bisenet_is_as_deep_as_the_wide_one(width):
    """Stages whose numbers of channels round to the same still halve the image."""
    model = models.build("bisenetv2", num_classes=3, inputs=(64, 64, 3), width=width)
    variables = jax.eval_shape(model.init, jax.random.key(0))
    x = jax.ShapeDtypeStruct((1, 64, 64, 3), jnp.float32)
    assert jax.eval_shape(model.apply, variables, x).logits.shape == (1, 64, 64, 3)


DENSE = ("bisenetv2", "deeplabv3")  # a class for every pixel


@pytest.mark.parametrize("name", DENSE)
def test_classes_of_pixels_of_images_of_any_size(name):
    size = (33, 70)
    model = models.build(name, num_classes=7, inputs=(*size, 3))
    variables = jax.eval_shape(model.init, jax.random.key(0))
    batch = jax.ShapeDtypeStruct((2, *size, 3), jnp.float32)
    train = lambda v, x: model.apply(v, x, jax.random.key(0), jnp.ones(2, bool))
    outputs = jax.eval_shape(train, variables, batch)
    heads = (outputs.logits, *outputs.auxiliary)
    assert [x.shape for x in heads] == [(2, *size, 7)] * (5 if name == "bisenetv2" else 1)
    evaluated = jax.eval_shape(model.apply, variables, batch)
    assert (evaluated.logits.shape, evaluated.auxiliary) == ((2, *size, 7), ())


def test_windows_that_overlap():
    x = np.random.default_rng(0).normal(size=(2, 7, 8, 3)).astype(np.float32)
    for join, of, fill in ((jnp.maximum, np.max, -np.inf), (jnp.add, np.sum, 0.0)):
        found = models.bisenet._windows(jnp.asarray(x), join, fill)
        padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=fill)
        expected = [[of(padded[:, i : i + 3, j : j + 3], axis=(1, 2)) for j in range(0, 8, 2)]
                    for i in range(0, 7, 2)]
        np.testing.assert_allclose(found, np.moveaxis(expected, 2, 0), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", DENSE)
def test_classes_of_pixels_are_learned(name):
    """Colours that say the class: a few steps halve the loss, with every parameter moved."""
    options = {"width": 0.25} if name == "bisenetv2" else {"features": 16}
    model = models.build(name, num_classes=3, inputs=(32, 32, 3), dropout=0.0, **options)
    labels = np.random.default_rng(0).integers(0, 3, (4, 4, 4)).repeat(8, 1).repeat(8, 2)
    images = np.eye(3, dtype=np.float32)[labels]
    data = ff.data.from_arrays(images, labels, num_classes=3, task="segmentation")
    task = ff.tasks.segmentation(model, ff.data.preprocess(data), data)
    client = ff.client.local_training(task, ff.client.sgd(0.05, momentum=0.9), batch_size=4,
                                      epochs=30)
    start = jax.jit(task.init)(jax.random.key(0))
    train = jax.jit(lambda v, d, key: client.train(v, d, key, round=jnp.int32(0)).variables)
    end = train(start, ff.data.whole(data.train), jax.random.key(1))
    first, last = (task.means(ff.evaluator(task, 4)(v, data.train)) for v in (start, end))
    assert float(last["loss"]) < 0.5 * float(first["loss"])
    same = [ff.parts.name_of(path) for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(start.params), jax.tree.leaves(end.params), strict=True)
        if np.array_equal(a, b)]
    assert not same


@pytest.mark.parametrize("name", sorted(models.MODELS))
def test_every_model_has_a_classifier_that_reads_its_features(name):
    inputs = SMALLEST.get(name, (8, 8, 1))
    options = {"embedding": 7} if name.endswith("_gem") else {}  # without, they have no classifier
    model = models.build(name, num_classes=7, inputs=inputs, **options)
    variables = shapes(name, 7, inputs, **options)
    one = inputs if isinstance(inputs, jax.ShapeDtypeStruct) else jnp.zeros((1, *inputs))
    batch = jax.ShapeDtypeStruct((3, *one.shape[1:]), one.dtype)
    outputs = jax.eval_shape(
        lambda v, x: model.apply(v, x, jax.random.key(0), jnp.ones(3, bool)), variables, batch
    )
    units = batch.shape[:2] if batch.dtype == jnp.int32 else batch.shape[:1]
    units = batch.shape[:3] if name in DENSE else units
    assert outputs.logits.shape == (*units, 7)
    width = variables.params["classifier"]["kernel"].shape[-2]
    assert outputs.features.shape[-1] == width
    assert name in DENSE or outputs.features.shape == (*units, width)
    assert jax.tree.structure(outputs.stats) == jax.tree.structure(variables.stats)
    assert models.MODELS[name].doc.endswith(".")


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


@pytest.mark.slow
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


def test_shortcuts_without_parameters():
    """Of ResNet-20: every second pixel, and zeros on both sides of the channels."""
    block = resnet.Block("group", 2, 4, 2, "pad")
    x = jax.random.normal(jax.random.key(0), (2, 6, 6, 2))
    params = block.init(jax.random.key(1), x, train=False, mask=None)["params"]
    assert set(params) == {"Conv_0", "Conv_1", "GroupNorm_0", "GroupNorm_1"}
    silent = jax.tree.map(jnp.zeros_like, params)
    out = block.apply({"params": silent}, x, train=False, mask=None)
    expected = np.zeros((2, 3, 3, 4), np.float32)
    expected[..., 1:3] = np.maximum(x[:, ::2, ::2], 0)
    np.testing.assert_array_equal(out, expected)


class Small(mobile.MobileNetV2):
    """The same network with two blocks, which compile quickly."""

    stages: ClassVar = (mobile.Stage(1, 8, 1, 1), mobile.Stage(2, 8, 1, 2, 5))


@pytest.mark.parametrize("network", [models.ResNet20, Small])
def test_padding_counts_in_no_statistic(network):
    """Two images and a masked third of anything train as the two alone do."""
    model = models.from_linen(network(num_classes=3, norm="batch"), (9, 9, 3))
    variables = jax.jit(model.init)(jax.random.key(0))
    images = jax.random.normal(jax.random.key(1), (3, 9, 9, 3))
    train = jax.jit(lambda x, mask: model.apply(variables, x, jax.random.key(2), mask))
    mask = jnp.array([True, True, False])
    padded, other = train(images, mask), train(images.at[2].set(9.0), mask)
    for a, b in zip(jax.tree.leaves(padded.stats), jax.tree.leaves(other.stats), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(padded.logits[:2], other.logits[:2])
    whole = train(images, jnp.ones(3, bool))
    assert np.abs(whole.logits[:2] - padded.logits[:2]).max() > 1e-3
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), padded.stats, variables.stats)
    assert min(jax.tree.leaves(moved)) > 0


def test_inverted_residual_equals_plain_flax():
    """The same parameters in flax's layers, with a stride and without; ReLU6 cuts."""
    norm = mobile.Norm("group", 2, 1e-3)

    def plain(p, x, features, stride):
        def layer(p, x, kernel, stride=1, groups=1):
            width = p["Conv_0"]["kernel"].shape[-1]
            conv = nn.Conv(width, (kernel, kernel), stride, "SAME", use_bias=False,
                           feature_group_count=groups)
            x = conv.apply({"params": p["Conv_0"]}, x)
            return nn.GroupNorm(2, epsilon=1e-3).apply({"params": p["GroupNorm_0"]}, x)

        y = jnp.clip(layer(p["expand"], x, 1), 0, 6)
        y = jnp.clip(layer(p["dw"], y, 5, stride, y.shape[-1]), 0, 6)
        y = layer(p["project"], y, 1)
        return x + y if (features, stride) == (x.shape[-1], 1) else y

    x = jax.random.normal(jax.random.key(0), (2, 7, 6, 4))
    for features, stride in ((4, 1), (6, 2)):
        block = mobile.Inverted(norm, 3, features, 5, stride)
        params = jax.jit(block.init, static_argnames="train")(
            jax.random.key(1), x, train=False, mask=None
        )["params"]
        params = jax.tree.map(lambda p: 5 * p, params)
        apply = jax.jit(lambda p, b=block: b.apply({"params": p}, x, train=False, mask=None))
        ours = apply(params)
        with jax.numpy_rank_promotion("allow"):
            expected = jax.jit(plain, static_argnums=(2, 3))(params, x, features, stride)
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)


def test_dropout_before_the_classifier():
    model = models.from_linen(Small(num_classes=3, norm="group", dropout=0.5), (9, 9, 3))
    variables = jax.jit(model.init)(jax.random.key(0))
    images = jax.random.normal(jax.random.key(1), (2, 9, 9, 3))
    apply = jax.jit(model.apply)
    still = np.asarray(apply(variables, images).features)
    moving = np.asarray(apply(variables, images, jax.random.key(0)).features)
    kept = moving != 0
    assert 0.4 < kept.sum() / (still != 0).sum() < 0.6
    np.testing.assert_allclose(moving[kept], 2 * still[kept], rtol=1e-5)


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
        ("resnet", (32, 32, 3), "unknown model 'resnet': expected one of bisenetv2, cnn"),
        ("shakespeare_lstm", (80,), "tokens are float32; expected whole numbers"),
        ("cnn", (8, 8, 1), r"cannot read inputs of shape \(8, 8, 1\).*larger than the image"),
    ],
)
def test_wrong_inputs(name, shape, message):
    with pytest.raises(ff.UsageError, match=message):
        models.build(name, num_classes=10, inputs=shape)


def test_bfloat16_is_refused_where_it_would_change_nothing():
    with pytest.raises(ff.UsageError, match="would change nothing: ShakespeareLSTM reads whole"):
        models.build("shakespeare_lstm", num_classes=9, inputs=TOKENS, precision="bfloat16")
