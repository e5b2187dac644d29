"""Convolution and pooling against independent formulations, in every mode of differentiation.

The oracle of the convolution is a sum over kernel taps, made of slices and matrix products only: an
autodiff of `lax.conv_general_dilated` would share XLA's code, and XLA 0.10.2 aborts on some of its
second derivatives. Values are compared with `lax.conv_general_dilated` as well. What is promised of
results holds for the primitives and for the plain `lax` operations behind FEDJAX_FLAT_OPS.
"""

import importlib
import sys

import flax.linen as nn
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax

import fedjax_flat
from fedjax_flat import errors, ops
from fedjax_flat.models import layers


def import_ops(switch):
    """A second `fedjax_flat.ops`, imported with this value of the switch, beside the first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDJAX_FLAT_OPS", switch)
        patch.setattr(fedjax_flat, "ops", ops)  # an import sets it
        for name in [n for n in sys.modules if n.startswith("fedjax_flat.ops")]:
            patch.delitem(sys.modules, name)
        return importlib.import_module("fedjax_flat.ops")


LAX = import_ops("lax")
both = pytest.mark.parametrize("ops", [ops, LAX], ids=["primitives", "lax"])


def explicit(padding, image, kernel, strides, dilation):
    if not isinstance(padding, str):
        return padding
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    return [tuple(map(int, p)) for p in lax.padtype_to_pads(image, reach, strides, padding)]


def taps(x, w, *, strides, padding, dilation, groups):
    """out[n, i, j, g, o] = sum over taps a, b and channels c of x[n, si + da, sj + db, g, c] w."""
    (kh, kw, c, o), (sh, sw), (dh, dw) = w.shape, strides, dilation
    x = jnp.pad(x, ((0, 0), *explicit(padding, x.shape[1:3], (kh, kw), strides, dilation), (0, 0)))
    oh = (x.shape[1] - dh * (kh - 1) - 1) // sh + 1
    ow = (x.shape[2] - dw * (kw - 1) - 1) // sw + 1
    w = w.reshape(kh, kw, c, groups, o // groups)
    total = 0.0
    for a in range(kh):
        for b in range(kw):
            part = x[:, a * dh : a * dh + sh * (oh - 1) + 1 : sh]
            part = part[:, :, b * dw : b * dw + sw * (ow - 1) + 1 : sw]
            part = part.reshape(*part.shape[:3], groups, c)
            total = total + jnp.einsum("nhwgc,cgo->nhwgo", part, w[a, b])
    return total.reshape(*total.shape[:3], o)


@st.composite
def cases(draw):
    pair = lambda low, high: st.tuples(st.integers(low, high), st.integers(low, high))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    kernel, strides, dilation = draw(pair(1, 4)), draw(pair(1, 3)), draw(pair(1, 2))
    padding = draw(st.sampled_from(["SAME", "VALID", ((1, 2), (0, 1)), ((0, 3), (2, 0))]))
    image = tuple(
        d * (k - 1) + 1 + draw(st.integers(0, 5)) for k, d in zip(kernel, dilation, strict=True)
    )
    channels, outputs = (groups * draw(st.integers(1, 2)) for _ in range(2))
    shapes = ((2, *image, channels), (*kernel, channels // groups, outputs))
    options = {"strides": strides, "padding": padding, "dilation": dilation, "groups": groups}
    return shapes, options


def everything(conv, x, w, u, v):
    """Value, gradients, Hessian-vector product, grad of grad, and three kinds of vmap."""
    loss = lambda x, w: jnp.sum(jnp.tanh(0.3 * conv(x, w)) ** 2)
    grad = jax.grad(loss, (0, 1))
    inner = lambda x, w: sum(jnp.vdot(g, t) for g, t in zip(grad(x, w), (u, v), strict=True))
    return {
        "value": conv(x, w),
        "gradient": grad(x, w),
        "forward mode": jax.jvp(loss, (x, w), (u, v))[1],
        "jvp of grad": jax.jvp(grad, (x, w), (u, v))[1],
        "grad of grad": jax.grad(inner, (0, 1))(x, w),
        "vmap over inputs": jax.vmap(grad, (1, None))(jnp.stack([x, u], 1), w),
        "vmap over weights": jax.vmap(grad, (None, 3))(x, jnp.stack([w, v], 3)),
        "vmap over both": jax.vmap(grad)(jnp.stack([x, u]), jnp.stack([w, v])),
    }


@both
@hypothesis.settings(max_examples=2, deadline=None, derandomize=True)
@hypothesis.given(cases())
def test_conv_in_every_mode(ops, case):
    check_every_mode(ops, case)


@pytest.mark.slow
@hypothesis.settings(max_examples=80, deadline=None, derandomize=True)
@hypothesis.given(cases())
def test_conv_in_every_mode_for_many_shapes(case):
    check_every_mode(ops, case)


def check_every_mode(ops, case):
    (x_shape, w_shape), options = case
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(0), 4)
        normal = lambda key, shape: jax.random.normal(key, shape, jnp.float64)
        arrays = [normal(k, s) for k, s in zip(keys, (x_shape, w_shape) * 2, strict=True)]
        ours = jax.jit(lambda *a: everything(lambda x, w: ops.conv(x, w, **options), *a))(*arrays)
        oracle = jax.jit(lambda *a: everything(lambda x, w: taps(x, w, **options), *a))(*arrays)
        plain = lax.conv_general_dilated(
            *arrays[:2], options["strides"], options["padding"],
            rhs_dilation=options["dilation"], feature_group_count=options["groups"],
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
    np.testing.assert_allclose(ours["value"], plain, rtol=1e-10, atol=1e-10)
    for name, expected in oracle.items():
        jax.tree.map(
            lambda a, b, name=name: np.testing.assert_allclose(
                a, b, rtol=1e-9, atol=1e-9, err_msg=name
            ),
            ours[name], expected,
        )


@pytest.mark.parametrize(("strides", "padding", "dilation", "groups"), [
    ((2, 1), ((1, 1), (0, 1)), (1, 2), 2),
    ((1, 1), ((0, 0), (0, 0)), (1, 1), 1),
    ((1, 2), ((1, 2), (0, 1)), (2, 1), 1),
    ((1, 1), ((4, 5), (1, 0)), (1, 1), 1),  # higher than the filter
    ((3, 1), ((0, 1), (2, 2)), (1, 1), 1),
])
def test_the_lowering_for_accelerators_is_the_same_function(strides, padding, dilation, groups):
    """What GPU and TPU get, run here: XLA's own convolution and its gradients."""
    module = importlib.import_module("fedjax_flat.ops.conv")
    geometry = module.Geometry((7, 6), (3, 2), strides, padding, dilation, groups)
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (2, 7, 6, 4))
    w = jax.random.normal(keys[1], (3, 2, 4 // groups, 6))
    g = jax.random.normal(keys[2], (2, *geometry.out, 6))
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    close(module._xla_input_grad(g, w, geometry), module._cpu_input_grad(g, w, geometry))
    close(module._xla_filter_grad(x, g, geometry), module._cpu_filter_grad(x, g, geometry))


@both
def test_padding_wider_than_the_filter(ops):
    """XLA:CPU's own gradient of this convolution is wrong in jaxlib 0.10.2."""
    x = jax.random.normal(jax.random.key(0), (2, 7, 6, 4))
    w = jax.random.normal(jax.random.key(1), (3, 2, 4, 6))
    options = {"strides": (1, 1), "padding": ((4, 5), (3, 0)), "dilation": (1, 1), "groups": 1}
    grad = lambda conv: jax.grad(lambda x: jnp.sum(jnp.sin(conv(x, w, **options))))(x)
    np.testing.assert_allclose(grad(ops.conv), grad(taps), rtol=1e-4, atol=1e-4)


def test_two_filters_per_channel():
    x = jax.random.normal(jax.random.key(0), (2, 6, 6, 4))
    w = jax.random.normal(jax.random.key(1), (3, 3, 1, 8))
    options = {"strides": (1, 1), "padding": "SAME", "dilation": (1, 1), "groups": 4}
    np.testing.assert_allclose(
        ops.conv(x, w, **options), taps(x, w, **options), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(("kernel", "strides", "dilation", "padding"), [
    ((3, 3), (1, 1), (1, 1), ((1, 1), (1, 1))),
    ((3, 3), (2, 2), (1, 1), ((0, 1), (0, 1))),
    ((3, 5), (2, 3), (2, 1), ((2, 0), (1, 4))),
    ((2, 2), (3, 1), (1, 2), ((0, 3), (2, 0))),
])
def test_depthwise_maps_equal_xlas(kernel, strides, dilation, padding):
    module = importlib.import_module("fedjax_flat.ops.conv")
    geometry = module.Geometry((9, 8), kernel, strides, padding, dilation, 3)
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(0), 3)
        shapes = (2, 9, 8, 3), (*kernel, 1, 3), (2, *geometry.out, 3)
        draw = lambda key, shape: jax.random.normal(key, shape, jnp.float64)
        x, w, g = map(draw, keys, shapes)
        operands = {"output": (x, w), "input_grad": (g, w), "filter_grad": (x, g)}
        for name, pair in operands.items():
            assert module.depthwise.fits(name, *pair, geometry)
            ours = module.depthwise.MAPS[name](*pair, geometry)
            expected = getattr(module, f"_xla_{name}")(*pair, geometry)
            np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-12, err_msg=name)
    assert not module.depthwise.fits("input_grad", g, jnp.ones((*kernel, 2, 3)), geometry)


def test_depthwise_has_no_convolution_on_cpu():
    """XLA:CPU would be ten times slower."""
    loss = lambda x, w: jnp.sum(jnp.sin(ops.conv(x, w, padding="SAME", groups=4)))
    arrays = jnp.ones((2, 6, 6, 4)), jnp.ones((3, 3, 1, 4))
    text = jax.jit(jax.grad(loss, (0, 1))).lower(*arrays).as_text()
    assert "convolution" not in text


def test_depthwise_accumulates_bfloat16_in_float32():
    """1 + 256 is 256 in bfloat16, and so is that plus 1, and again."""
    x, w = jnp.array([1.0, 256.0, 1.0, 1.0]), jnp.ones((1, 4, 1, 2), jnp.bfloat16)
    x = jnp.broadcast_to(x.reshape(1, 1, 4, 1), (1, 1, 4, 2)).astype(jnp.bfloat16)
    out = ops.conv(x, w, groups=2)
    assert out.dtype == jnp.bfloat16
    assert float(out[0, 0, 0, 0]) == float(jnp.bfloat16(259))  # 260


@both
def test_bfloat16_accumulates_in_float32(ops):
    """1,000 ones plus a small number: bfloat16 sums would stop at 256."""
    x = jnp.ones((1, 1, 1, 1000), jnp.bfloat16)
    w = jnp.ones((1, 1, 1000, 1), jnp.bfloat16)
    out = ops.conv(x, w)
    assert out.dtype == jnp.bfloat16
    assert float(out[0, 0, 0, 0]) == 1000
    grads = jax.grad(lambda x, w: ops.conv(x, w).sum().astype(jnp.float32), (0, 1))(x, w)
    assert all(g.dtype == jnp.bfloat16 for g in grads)


def test_no_grouped_convolution_on_cpu_when_both_are_batched():
    x, w = jnp.ones((3, 2, 8, 8, 4)), jnp.ones((3, 3, 3, 4, 4))
    lowered = jax.jit(jax.vmap(ops.conv)).lower(x, w)
    text = lowered.compile().as_text()
    assert "feature_group_count=3" not in text
    assert "batch_group_count" not in text


@both
@pytest.mark.parametrize("shape", [(2, 6, 6, 3), (2, 7, 5, 3)])
def test_max_pool_agrees_with_reduce_window(ops, shape):
    x = jax.random.normal(jax.random.key(0), shape)
    t = jax.random.normal(jax.random.key(1), shape)
    window = lambda x: lax.reduce_window(
        x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
    )
    np.testing.assert_array_equal(ops.max_pool(x), window(x))
    grad = lambda pool: jax.grad(lambda x: jnp.sum(jnp.sin(pool(x))))
    np.testing.assert_allclose(grad(ops.max_pool)(x), grad(window)(x), rtol=1e-6)
    # Second derivative: sin'' at the maxima, zero elsewhere.
    product = jax.jvp(grad(ops.max_pool), (x,), (t,))[1]
    at_maximum = jnp.where(grad(window)(x) != 0, -jnp.sin(x) * t, 0.0)
    np.testing.assert_allclose(product, at_maximum, rtol=1e-5, atol=1e-6)


@both
def test_second_derivatives_of_max_pool_in_batches_and_in_reverse(ops):
    x, y, t = (jax.random.normal(jax.random.key(i), (2, 7, 5, 3)) for i in range(3))
    grad = jax.grad(lambda x: jnp.sum(jnp.sin(ops.max_pool(x))))
    product = lambda x, t: jax.jvp(grad, (x,), (t,))[1]
    pair, close = jnp.stack([product(x, t), product(y, t)]), np.testing.assert_allclose
    close(jax.vmap(product, (1, None))(jnp.stack([x, y], 1), t), pair, rtol=1e-6)
    close(jax.vmap(product, (None, 2))(x, jnp.stack([t, -t], 2))[1], -pair[0], rtol=1e-6)
    reverse = jax.grad(lambda x: jnp.vdot(grad(x), t))
    close(reverse(x), pair[0], rtol=1e-6)


@both
def test_a_result_that_nobody_differentiates(ops):
    second = jax.custom_vjp(lambda pooled, x: x)
    second.defvjp(lambda pooled, x: (x, None), lambda _, ct: (None, ct))
    grad = jax.grad(lambda x: jnp.sum(second(ops.max_pool(x), x)))
    np.testing.assert_array_equal(grad(jnp.zeros((1, 2, 2, 1))).ravel(), [1, 1, 1, 1])


@both
def test_the_first_of_equal_maxima_takes_the_gradient(ops):
    x = jnp.zeros((1, 2, 2, 1))
    grad = jax.grad(lambda x: jnp.sum(ops.max_pool(x)))(x)
    np.testing.assert_array_equal(grad.ravel(), [1, 0, 0, 0])


def test_avg_pool():
    x = jnp.arange(16.0).reshape(1, 4, 4, 1)
    np.testing.assert_array_equal(ops.avg_pool(x).ravel(), [2.5, 4.5, 10.5, 12.5])


@pytest.mark.parametrize("window", [2, 3])
def test_pooled_convolution_commutes_with_its_bias(window):
    layer = layers.Conv(4, (3, 3), pool=window)
    x = jax.random.normal(jax.random.key(0), (2, 11, 11, 2))
    params = layer.init(jax.random.key(1), x)["params"]
    before = ops.conv(x, params["kernel"]) + params["bias"].reshape(1, 1, 1, -1)
    np.testing.assert_array_equal(layer.apply({"params": params}, x), ops.max_pool(before, window))


@both
def test_bias_in_every_mode(ops):
    key = iter(jax.random.split(jax.random.key(0), 4))
    draw = lambda *shape: jax.random.normal(next(key), shape)
    x, b, u, v = draw(3, 2, 4, 5, 6), draw(3, 6), draw(3, 2, 4, 5, 6), draw(3, 6)
    plain = lambda x, b: x + b.reshape(1, 1, 1, -1)

    def modes(add):
        loss = lambda x, b: jnp.sum(jnp.sin(add(x, b)) * x)
        gradient = jax.grad(loss, argnums=(0, 1))
        product = lambda x, b, u, v: jax.jvp(gradient, (x, b), (u, v))[1]
        twice = lambda x, b, u, v: jax.grad(
            lambda x, b: jnp.vdot(gradient(x, b)[1], v), argnums=(0, 1)
        )(x, b)
        return (
            jax.vmap(add)(x, b),
            jax.vmap(add, (None, 0))(x[0], b),
            jax.vmap(add, (0, None), 1)(x, b[0]),
            gradient(x[0], b[0]),
            jax.vmap(gradient, in_axes=(1, None))(jnp.moveaxis(x, 0, 1), b[0]),
            jax.grad(lambda b: jnp.sum(jnp.sin(jax.vmap(add)(x, b))))(b),
            jax.jit(jax.vmap(product))(x, b, u, v),
            jax.jit(jax.vmap(twice))(x, b, u, v),
        )

    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5),
        modes(ops.add_bias), modes(plain),
    )


@both
def test_gradient_of_a_bias_sums_bfloat16_in_float32(ops):
    x = jnp.full((2, 40, 40, 1), 1.0, jnp.bfloat16)
    total = lambda b: jnp.sum(ops.add_bias(x, b)[:1].astype(jnp.float32))
    gradient = jax.grad(total)(jnp.zeros((1,), jnp.bfloat16))
    assert gradient.dtype == jnp.bfloat16
    assert gradient[0] == 1600  # summed in bfloat16: 256
    sums = importlib.import_module("fedjax_flat.ops.sums")
    np.testing.assert_array_equal(sums._xla_total(x), sums._cpu_total(x))


def test_layers_share_names_and_shapes_with_flax():
    x = jnp.ones((1, 9, 9, 4))
    shapes = lambda m: jax.tree.map(jnp.shape, m.init(jax.random.key(0), x)["params"])
    options = {"strides": (2, 2), "padding": "SAME", "feature_group_count": 2}
    assert shapes(layers.Conv(6, (3, 3), **options)) == shapes(nn.Conv(6, (3, 3), **options))
    params = layers.Conv(6, (3, 3), **options).init(jax.random.key(0), x)
    with jax.numpy_rank_promotion("allow"):
        plain = nn.Conv(6, (3, 3), **options).apply(params, x)
    ours = layers.Conv(6, (3, 3), **options).apply(params, x)
    np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


@both
@pytest.mark.parametrize(
    "options",
    [{}, {"strides": 2, "padding": "VALID", "kernel_dilation": 2}, {"feature_group_count": 4}],
)
def test_plain_flax_convolution_with_our_operation(ops, options):
    x = jax.random.normal(jax.random.key(0), (2, 9, 9, 4))
    ours = nn.Conv(8, (3, 3), conv_general_dilated=ops.conv_general_dilated, **options)
    plain = nn.Conv(8, (3, 3), **options)
    with jax.numpy_rank_promotion("allow"):
        params = ours.init(jax.random.key(1), x)
        jax.tree.map(
            np.testing.assert_array_equal, params, plain.init(jax.random.key(1), x)
        )
        np.testing.assert_allclose(
            ours.apply(params, x), plain.apply(params, x), rtol=1e-5, atol=1e-5
        )
        assert ("conv_output" in str(jax.make_jaxpr(ours.apply)(params, x))) == (ops is not LAX)


def no_module(patch):
    patch.delattr(jax.interpreters, "mlir")
    patch.setitem(sys.modules, "jax.interpreters.mlir", None)


def no_function(patch):
    patch.delattr("jax.interpreters.ad.is_undefined_primal")  # missed only by a derivative


def other_arguments(patch):
    patch.setattr("jax.interpreters.mlir.register_lowering", lambda primitive, rule: None)


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        (no_module, "import of jax.interpreters.mlir halted"),
        (no_function, "no attribute 'is_undefined_primal'"),
        (other_arguments, "unexpected keyword argument 'platform'"),
    ],
)
def test_without_the_internals_of_jax_one_warning_and_the_same_numbers(change, missing):
    message = f"{missing}.* Plain lax operations are used instead: the results are the same"
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        with pytest.warns(UserWarning, match=message) as caught:
            plain = import_ops("primitives")
    assert len(caught) == 1
    x = jax.random.normal(jax.random.key(0), (2, 6, 6, 2))
    w = jax.random.normal(jax.random.key(1), (3, 3, 2, 4))

    def product(ops):
        layer = lambda x, w: ops.max_pool(ops.add_bias(ops.conv(x, w), w[0, 0, 0]))
        loss = lambda x, w: jnp.sum(jnp.sin(layer(x, w)))
        return jax.jit(lambda x, w: jax.jvp(jax.grad(loss, (0, 1)), (x, w), (x, w)))

    assert "conv_output" not in str(jax.make_jaxpr(product(plain))(x, w))
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5),
        product(plain)(x, w), product(ops)(x, w),
    )


def test_wrong_switch():
    message = "unknown FEDJAX_FLAT_OPS 'primitive': .* Did you mean 'primitives'"
    with pytest.raises(errors.UsageError, match=message):
        import_ops("primitive")


def test_flax_layouts_that_are_not_ours():
    with pytest.raises(ValueError, match="input dilation"):
        ops.conv_general_dilated(
            jnp.ones((1, 4, 4, 1)), jnp.ones((1, 1, 1, 1)), (1, 1), "SAME", lhs_dilation=(2, 2),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
    with pytest.raises(ValueError, match="expected 2-D images in"):
        ops.conv_general_dilated(
            jnp.ones((1, 1, 4, 4)), jnp.ones((1, 1, 1, 1)), (1, 1), "SAME",
            dimension_numbers=("NCHW", "HWIO", "NCHW"),
        )


@pytest.mark.parametrize(
    ("x", "w", "options", "message"),
    [
        ((1, 8, 8, 3), (3, 3, 4, 2), {}, "images have 3 channels"),
        ((8, 8, 3), (3, 3, 3, 2), {}, r"expected \(N, H, W, C\)"),
        ((1, 4, 4, 3), (5, 5, 3, 2), {}, "larger than the image"),
        ((1, 8, 8, 4), (3, 3, 1, 4), {"groups": 3}, "3 groups divide neither"),
        ((1, 8, 8, 4), (3, 3, 2, 3), {"groups": 2}, "expected a divisor of both"),
    ],
)
def test_wrong_shapes(x, w, options, message):
    with pytest.raises(ValueError, match=message):
        ops.conv(jnp.zeros(x), jnp.zeros(w), **options)


def test_wrong_types():
    with pytest.raises(TypeError, match="images are float32, filters bfloat16"):
        ops.conv(jnp.zeros((1, 4, 4, 1)), jnp.zeros((1, 1, 1, 1), jnp.bfloat16))
