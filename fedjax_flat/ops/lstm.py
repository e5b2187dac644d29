"""A long short-term memory whose loops hold nothing but what depends on the step before.

Hochreiter and Schmidhuber (1997), with the forget gate of Gers et al. (2000), as in PyTorch:

    a_t = x_t + h_{t-1} W                        four gates a_t = (i, f, g, o)
    c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g)
    h_t = sigmoid(o) tanh(c_t)

where x_t are the inputs after their own weights and biases, one matrix product for all steps.

JAX's gradient of this loop adds to that of W in every step, B rows at a time. Here the derivative is
written out: da_t = (dx_t + h_{t-1} dW) + dh_{t-1} W, whose bracket is one product for all steps, so
that W's gradient, the transpose, is one product too. It is a rule for tangents (`custom_jvp`),
hence forward mode, Hessian products and batching work as for any other code.
"""

import jax
import jax.numpy as jnp
from jax import lax

UNROLL = 4  # steps per turn of a loop; see benchmarks/lstm.py


@jax.custom_jvp
def lstm(x: jax.Array, w: jax.Array) -> jax.Array:
    """x (T, B, 4 H) and w (H, 4 H) -> h (T, B, H), from a state of zeros."""
    return _forward(x, w)[0]


@lstm.defjvp
def _lstm_jvp(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    h, c, (i, f, g, o) = _forward(x, w)
    before = lambda v: jnp.concatenate([jnp.zeros_like(v[:1]), v[:-1]])
    tanh_c = jnp.tanh(c)
    slope = lambda s: s * (1 - s)
    to_c = jnp.concatenate([slope(i) * g, slope(f) * before(c), i * (1 - g * g)], axis=-1)
    through_c, to_h = o * (1 - tanh_c * tanh_c), slope(o) * tanh_c

    def step(carry, t):
        dh, dc = carry
        da, f, to_c, through_c, to_h = t
        da = da + dh @ w
        parts = to_c * da[:, : to_c.shape[1]]
        dc = f * dc + sum(jnp.split(parts, 3, axis=1))
        dh = through_c * dc + to_h * da[:, to_c.shape[1] :]
        return (dh, dc), dh

    zero = jnp.zeros_like(h[0])
    steps = (dx + before(h) @ dw, f, to_c, through_c, to_h)
    return h, lax.scan(step, (zero, zero), steps, unroll=UNROLL)[1]


def _forward(x, w):
    """h, c and the four gates of all steps."""

    def step(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(x + h @ w, 4, axis=-1)
        i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
        c = f * c + i * g
        h = o * jnp.tanh(c)
        return (h, c), (h, c, (i, f, g, o))

    zero = jnp.zeros((x.shape[1], w.shape[0]), x.dtype)
    return lax.scan(step, (zero, zero), x, unroll=UNROLL)[1]
