"""A convolution that stays fast inside loops on XLA:CPU and is closed under differentiation.

XLA:CPU recognises only plain NHWC/HWIO convolutions inside a while body; the filter and input
gradients that JAX writes are something else there, and run 20 to 70 times slower
(jax-ml/jax#12868). So the three bilinear maps

    output(x, w),   input_grad(g, w),   filter_grad(x, g)

are primitives of their own. Each is the transpose of another, so `jvp`, `vjp`, `jvp(grad)` and
`grad(grad)` never leave the set. On CPU each is lowered to one plain convolution:

- input_grad: a textbook full correlation also multiplies the zeros around g, (H W)/(h w) times too
  much work. Here only the width is padded; the kernel's rows are output channels, and their results
  are shifted and added along the height. 1.5x faster for 5x5 filters on 14x14 images.
- filter_grad: examples become channels, g becomes the filter, strides become dilation.
- one channel per group: sums over the kernel's taps instead (depthwise.py).

On other platforms they lower to XLA's own convolution and its gradients.

Batching. A batch of inputs, or of weights, joins the examples or the channels of one convolution.
A batch of both (one model per client) is a loop on CPU, because a grouped convolution is slow
there; elsewhere it is XLA's grouped convolution.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_flat.ops import depthwise, kernels
from fedjax_flat.ops.primitive import Operation, accumulator, primitive

Pair = tuple[int, int]
LAYOUT = ("NHWC", "HWIO", "NHWC")


@dataclasses.dataclass(frozen=True)
class Geometry:
    """What is static about a convolution; its three maps share it."""

    image: Pair
    kernel: Pair
    strides: Pair
    padding: tuple[Pair, Pair]
    dilation: Pair
    groups: int

    @property
    def out(self) -> Pair:
        """Height and width of the output."""
        height, width = (
            (n + sum(p) - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip(
                self.image, self.kernel, self.strides, self.padding, self.dilation, strict=True
            )
        )
        return height, width


def conv(
    x: jax.Array,
    w: jax.Array,
    *,
    strides: int | Pair = 1,
    padding: str | int | Sequence[Pair] = "VALID",
    dilation: int | Pair = 1,
    groups: int = 1,
) -> jax.Array:
    """Convolves x (N, H, W, C) with w (h, w, C / groups, O); the result is (N, H', W', O)."""
    _check_shapes(x, w, groups)
    strides, dilation = _pair(strides), _pair(dilation)
    geometry = Geometry(
        image=(x.shape[1], x.shape[2]),
        kernel=(w.shape[0], w.shape[1]),
        strides=strides,
        padding=_explicit_padding(padding, x.shape[1:3], w.shape[:2], strides, dilation),
        dilation=dilation,
        groups=groups,
    )
    if min(geometry.out) < 1:
        raise ValueError(
            f"conv: a filter of {geometry.kernel} (dilation {dilation}) is larger than the image "
            f"of {geometry.image} with padding {geometry.padding}."
        )
    return _output_p.bind(x, w, geometry=geometry)


def conv_general_dilated(
    lhs, rhs, window_strides, padding, lhs_dilation=None, rhs_dilation=None, dimension_numbers=None,
    feature_group_count=1, precision=None, preferred_element_type=None,
) -> jax.Array:
    """`conv` for `flax.linen.Conv(..., conv_general_dilated=ops.conv_general_dilated)`.

    So any flax model gets it with its own parameter names, shapes and initialisers.
    """
    del precision, preferred_element_type
    channels_last = lax.conv_dimension_numbers(lhs.shape, rhs.shape, LAYOUT)
    if lhs.ndim != 4 or dimension_numbers not in (LAYOUT, channels_last):
        raise ValueError(f"conv: layout {dimension_numbers}; expected 2-D images in {LAYOUT}.")
    if any(d != 1 for d in lhs_dilation or ()):
        raise ValueError(f"conv: input dilation {lhs_dilation} is not supported; expected 1.")
    return conv(
        lhs, rhs, strides=tuple(window_strides), padding=padding,
        dilation=tuple(rhs_dilation or (1, 1)), groups=feature_group_count,
    )


def _check_shapes(x, w, groups):
    if x.ndim != 4 or w.ndim != 4:
        raise ValueError(
            f"conv: images of shape {x.shape} with filters of shape {w.shape}; expected "
            "(N, H, W, C) with (h, w, C / groups, O)."
        )
    if x.dtype != w.dtype:
        raise TypeError(f"conv: images are {x.dtype}, filters {w.dtype}; expected the same type.")
    channels, outputs = x.shape[3], w.shape[3]
    if groups < 1 or channels % groups or outputs % groups:
        raise ValueError(
            f"conv: {groups} groups divide neither or only one of {channels} input and {outputs} "
            "output channels; expected a divisor of both."
        )
    if w.shape[2] * groups != channels:
        raise ValueError(
            f"conv: images have {channels} channels; filters of shape {w.shape} with {groups} "
            f"groups expect {w.shape[2] * groups}."
        )


def _pair(value) -> Pair:
    return (value, value) if isinstance(value, int) else tuple(value)


def _explicit_padding(padding, image, kernel, strides, dilation):
    if isinstance(padding, str):
        reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
        pads = lax.padtype_to_pads(image, reach, strides, padding.upper())
        return tuple((int(a), int(b)) for a, b in pads)
    if isinstance(padding, int):
        return ((padding, padding), (padding, padding))
    return tuple(_pair(p) for p in padding)


# The three maps as XLA would write them.


def _xla_output(x, w, geometry: Geometry):
    padding = geometry.padding
    reach = [d * (k - 1) for d, k in zip(geometry.dilation, geometry.kernel, strict=True)]
    if any(max(p) > r for p, r in zip(padding, reach, strict=True)):
        # XLA:CPU's own gradient for windows of nothing but padding is wrong in jaxlib 0.10.2.
        x, padding = jnp.pad(x, ((0, 0), *padding, (0, 0))), ((0, 0), (0, 0))
    return lax.conv_general_dilated(
        x,
        w,
        geometry.strides,
        padding,
        rhs_dilation=geometry.dilation,
        dimension_numbers=LAYOUT,
        feature_group_count=geometry.groups,
        preferred_element_type=accumulator(x),
    ).astype(x.dtype)


def _xla_input_grad(g, w, geometry: Geometry):
    shape = (g.shape[0], *geometry.image, w.shape[2] * geometry.groups)
    transpose = jax.linear_transpose(
        lambda x: _xla_output(x, w, geometry), jax.ShapeDtypeStruct(shape, g.dtype)
    )
    return transpose(g)[0]


def _xla_filter_grad(x, g, geometry: Geometry):
    shape = (*geometry.kernel, x.shape[3] // geometry.groups, g.shape[3])
    transpose = jax.linear_transpose(
        lambda w: _xla_output(x, w, geometry), jax.ShapeDtypeStruct(shape, g.dtype)
    )
    return transpose(g)[0]


# The same maps, each as one plain NHWC/HWIO convolution.


def _cpu_input_grad(g, w, geometry: Geometry):
    (image_h, image_w), (kh, kw) = geometry.image, geometry.kernel
    (stride_h, stride_w), (dilate_h, dilate_w) = geometry.strides, geometry.dilation
    (top, _), (left, _) = geometry.padding
    groups, n, out_h, out_w = geometry.groups, g.shape[0], g.shape[1], g.shape[2]
    zero = jnp.zeros((), g.dtype)
    # Full correlation along the width only.
    reach = dilate_w * (kw - 1)
    spread = (out_w - 1) * stride_w + 1
    before = reach - left
    after = image_w - spread + reach - before
    none = (0, 0, 0)
    g = lax.pad(g, zero, (none, none, (before, after, stride_w - 1), none))
    # (h, w, C/G, G, O/G) -> (1, w, O/G, G, h, C/G): the kernel's rows become output channels.
    w = w.reshape(kh, kw, w.shape[2], groups, -1)[:, ::-1]
    channels = w.shape[2]
    w = jnp.transpose(w, (1, 4, 3, 0, 2)).reshape(1, kw, w.shape[4], groups * kh * channels)
    rows = lax.conv_general_dilated(
        g, w, (1, 1), "VALID", rhs_dilation=(1, dilate_w), dimension_numbers=LAYOUT,
        feature_group_count=groups, preferred_element_type=accumulator(g),
    )
    if stride_h == groups == 1 < kh:
        return _sum_rows(rows, geometry).astype(g.dtype)
    rows = rows.reshape(n, out_h, image_w, groups, kh, channels)
    # Row a of the kernel lands at height stride * i + dilation * a - top.
    zero = jnp.zeros((), rows.dtype)
    parts = []
    for a in range(kh):
        before = dilate_h * a - top
        after = image_h - (out_h - 1) * stride_h - 1 - before
        part = rows[:, :, :, :, a].reshape(n, out_h, image_w, groups * channels)
        parts.append(lax.pad(part, zero, (none, (before, after, stride_h - 1), none, none)))
    return functools.reduce(jnp.add, parts).astype(g.dtype)


def _sum_rows(rows, geometry: Geometry):
    """The same sum without strides and groups: one `reduce_window`, which XLA fuses with nothing.

    Seen as (N, h W kh, C), where row a of the kernel is the fastest part of the second axis, the
    summands of one pixel are equally far apart, and the pixels are kh apart.
    """
    n, out_h, width, features = rows.shape
    (height, _), (kh, _), (dilation, _) = geometry.image, geometry.kernel, geometry.dilation
    top = geometry.padding[0][0]
    length, channels = out_h * width * kh, features // kh
    apart = dilation * width * kh - 1
    before = apart * (kh - 1) - top * width * kh
    after = kh * (height * width - 1) + 1 + apart * (kh - 1) - before - length
    out = lax.reduce_window(
        rows.reshape(n, length, channels), jnp.zeros((), rows.dtype), lax.add,
        (1, kh, 1), (1, kh, 1), ((0, 0), (before, after), (0, 0)), window_dilation=(1, apart, 1),
    )
    return out.reshape(n, height, width, channels)


def _cpu_filter_grad(x, g, geometry: Geometry):
    groups = geometry.groups
    # Just the part of the padded image that some window reaches.
    pads = [
        (low, d * (k - 1) + s * (o - 1) + 1 - size - low, 0)
        for (low, _), d, k, s, o, size in zip(
            geometry.padding, geometry.dilation, geometry.kernel, geometry.strides, geometry.out,
            geometry.image, strict=True,
        )
    ]
    x = lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), *pads, (0, 0, 0)))
    dw = lax.conv_general_dilated(
        _examples_last(x, groups), jnp.transpose(g, (1, 2, 0, 3)), geometry.dilation, "VALID",
        rhs_dilation=geometry.strides, dimension_numbers=LAYOUT, feature_group_count=groups,
        preferred_element_type=accumulator(g),
    )
    return jnp.transpose(dw, (1, 2, 0, 3)).astype(g.dtype)


def _examples_last(x, groups):
    """(N, H, W, G C) -> (C, H, W, G N).

    XLA:CPU's own transpose computes x once more inside itself, and examples are often a multiple of
    4096 bytes apart, so that all fall into one set of the cache. Hence first a copy with 64 bytes
    more per example, by an operation that XLA neither fuses nor sees through: a sum over windows of
    one number and one zero.
    """
    n, height, width, features = x.shape
    channels, apart = features // groups, 64 // x.dtype.itemsize
    x = lax.reduce_window(
        x.reshape(n, -1, 1), jnp.zeros((), x.dtype), lax.add, (1, 1, 2), (1, 1, 1),
        ((0, 0), (0, apart), (0, 1)),
    )
    x = x[:, :-apart].reshape(n, height, width, groups, channels)
    return x.transpose(4, 1, 2, 3, 0).reshape(channels, height, width, groups * n)


# Where a batch of the first or of the second operand goes when the other is not batched: the axis
# that it joins, in the operand and in the result.
_JOIN = {
    "output": ((0, 0), (3, 3)),  # x: examples; w: output channels
    "input_grad": ((0, 0), (2, 3)),  # g: examples; w: input channels
    "filter_grad": ((3, 2), (3, 3)),  # x: input channels; g: output channels
}


def _map(name, transposes, xla, cpu=None):
    """One of the three maps as a primitive."""
    plain = cpu or xla

    def on_cpu(a, b, geometry):
        if kernels.takes(name, a, b, geometry):
            return kernels.call(name, a, b, geometry)
        if depthwise.fits(name, a, b, geometry):
            return depthwise.MAPS[name](a, b, geometry)
        return plain(a, b, geometry)

    def batch(p, args, dims, *, geometry):
        bind = functools.partial(p.bind, geometry=geometry)
        a, b = args
        if dims[0] is not None and dims[1] is not None:
            pair = (jnp.moveaxis(a, dims[0], 0), jnp.moveaxis(b, dims[1], 0))
            loop = lambda a, b: lax.map(lambda t: bind(*t), (a, b))
            grouped = jax.vmap(lambda a, b: xla(a, b, geometry))
            return lax.platform_dependent(*pair, cpu=loop, default=grouped), 0
        which = 0 if dims[1] is None else 1
        axis_in, axis_out = _JOIN[name][which]
        if geometry.groups > 1 and axis_in > 0:  # channels are interleaved with groups
            moved = jnp.moveaxis(args[which], dims[which], 0)
            return lax.map(lambda y: bind(*((y, b) if which == 0 else (a, y))), moved), 0
        size = args[which].shape[dims[which]]
        joined = _join(args[which], dims[which], axis_in)
        out = bind(*((joined, b) if which == 0 else (a, joined)))
        return out.reshape(*out.shape[:axis_out], size, -1, *out.shape[axis_out + 1 :]), axis_out

    return primitive(f"conv_{name}", xla, transposes, cpu=on_cpu, batch=batch)


def _join(x, axis, target):
    """Makes the batch axis the slower part of axis `target` of the unbatched array."""
    x = jnp.moveaxis(x, axis, target)
    return lax.collapse(x, target, target + 2)


_output_p: Operation = _map(
    "output",
    [
        lambda ct, x, w, geometry: _input_grad_p.bind(ct, w, geometry=geometry),
        lambda ct, x, w, geometry: _filter_grad_p.bind(x, ct, geometry=geometry),
    ],
    _xla_output,
)
_input_grad_p: Operation = _map(
    "input_grad",
    [
        lambda ct, g, w, geometry: _output_p.bind(ct, w, geometry=geometry),
        lambda ct, g, w, geometry: _filter_grad_p.bind(ct, g, geometry=geometry),
    ],
    _xla_input_grad,
    _cpu_input_grad,
)
_filter_grad_p: Operation = _map(
    "filter_grad",
    [
        lambda ct, x, g, geometry: _input_grad_p.bind(g, ct, geometry=geometry),
        lambda ct, x, g, geometry: _output_p.bind(x, ct, geometry=geometry),
    ],
    _xla_filter_grad,
    _cpu_filter_grad,
)
