"""Pooling whose gradient is cheap on CPU.

The gradient of `lax.reduce_window` max pooling is a select-and-scatter, ten times slower than
remembering where in its block each maximum was, which makes the gradient one elementwise pass that
does not read the input again. The maximum itself is a `reduce_window`, because XLA:CPU fuses none:
a maximum of slices it would compute once more, example by example, inside the transpose before the
next layer's filter gradient (a seventh of a step of the papers' CNN). Of equal maxima the first
takes the gradient, as in PyTorch. Blocks do not overlap; a ragged border is dropped, as in PyTorch.

Derivatives are two primitives, each the transpose of the other: `pick` the values at the remembered
places, and `put` them back. So a linearised gradient keeps one byte per maximum.
"""

import functools
import itertools

import jax
import jax.numpy as jnp

from fedjax_flat.ops.primitive import Operation, primitive


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def max_pool(x: jax.Array, window: int = 2) -> jax.Array:
    """Maximum over disjoint window x window blocks of x (N, H, W, C)."""
    block = (1, window, window, 1)
    lowest = jnp.asarray(-jnp.inf, x.dtype)
    return jax.lax.reduce_window(x, lowest, jax.lax.max, block, block, "VALID")


@max_pool.defjvp
def _max_pool_jvp(window, primals, tangents):
    (x,), (t,) = primals, tangents
    return max_pool(x, window), _pick_p.bind(t, _place(x, window), window=window)


def _place(x, window):
    """The position 0 .. window^2 - 1 of each maximum in its block."""
    rows, cols = _covered(x, window)
    best, *others = (
        x[:, i:rows:window, j:cols:window]
        for i, j in itertools.product(range(window), repeat=2)
    )
    place = jnp.zeros(best.shape, jnp.uint8)
    for k, view in enumerate(others, 1):
        # A NaN wins, as it does in lax.max.
        place = jnp.where((view > best) | jnp.isnan(view), jnp.uint8(k), place)
        best = jnp.maximum(best, view)
    return place


def _pick(x, place, window):
    """The values at these places, (N, H, W, C) -> (N, h, w, C)."""
    blocks, zero = _blocks(x, window), jnp.zeros((), x.dtype)
    return sum(
        jnp.where(place == k, blocks[:, :, i, :, j], zero)
        for k, (i, j) in enumerate(itertools.product(range(window), repeat=2))
    )


def _put(values, place, window, image):
    """Back to these places in an image of zeros, (N, h, w, C) -> (N, H, W, C)."""
    n, rows, cols, channels = values.shape
    offset = jnp.arange(window, dtype=place.dtype)
    here = offset.reshape(1, 1, -1, 1, 1, 1) * window + offset.reshape(1, 1, 1, 1, -1, 1)
    apart = lambda x: x[:, :, None, :, None, :]
    blocks = jnp.where(apart(place) == here, apart(values), jnp.zeros((), values.dtype))
    covered = blocks.reshape(n, rows * window, cols * window, channels)
    border = [(0, size - along) for size, along in zip(image, covered.shape[1:3], strict=True)]
    return jnp.pad(covered, ((0, 0), *border, (0, 0)))


def avg_pool(x: jax.Array, window: int = 2) -> jax.Array:
    """Mean over disjoint window x window blocks of x (N, H, W, C)."""
    return jnp.mean(_blocks(x, window), axis=(2, 4))


def _covered(x, window):
    return x.shape[1] // window * window, x.shape[2] // window * window


def _blocks(x, window):
    """(N, H, W, C) -> (N, H / window, window, W / window, window, C)."""
    rows, cols = _covered(x, window)
    return x[:, :rows, :cols].reshape(
        x.shape[0], rows // window, window, cols // window, window, x.shape[3]
    )


def _pick_transpose(ct, x, place, window):
    return _put_p.bind(ct, place, window=window, image=x.aval.shape[1:3])


def _put_transpose(ct, values, place, window, image):
    del values, image
    return _pick_p.bind(ct, place, window=window)


_pick_p: Operation = primitive("pick", _pick, [_pick_transpose, None])
_put_p: Operation = primitive("put", _put, [_put_transpose, None])
