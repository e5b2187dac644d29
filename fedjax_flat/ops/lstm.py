"""A long short-term memory whose loops hold nothing but what depends on the step before.

Hochreiter and Schmidhuber (1997), with the forget gate of Gers et al. (2000), as in PyTorch:

    a_t = x_t + h_{t-1} W                        four gates, a_t = (i, f, g, o)
    c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g)
    h_t = sigmoid(o) tanh(c_t)

where x_t are the inputs after their own weights and biases, one matrix product for all steps.

JAX's gradient of this loop adds to that of W in every step, a few rows at a time. Here the
derivative is written out (with d for tangents, and p, q, r from the values of all steps):

    da_t = (dx_t + h_{t-1} dW) + dh_{t-1} W
    dc_t = f_t dc_{t-1} + sum over gates of p_t da_t
    dh_t = r_t dc_t + sum over gates of q_t da_t

The bracket is one product for all steps, hence so is W's gradient, its transpose. As a rule for
tangents (`custom_jvp`) it serves forward mode, Hessian products and batches as well.
"""

import jax
import jax.numpy as jnp
from jax import lax

UNROLL = 1  # steps per turn of a loop: more were no faster, and slower to compile


@jax.custom_jvp
def lstm(x: jax.Array, w: jax.Array) -> jax.Array:
    """x (T, B, 4 H) and w (H, 4 H) -> h (T, B, H), from a state of zeros."""
    return _forward(x, w)[0]


def _forward(x, w):
    """h (T, B, H), c (T, B, H) and the gates (T, B, 4, H)."""
    width = w.shape[0]
    # sigmoid(a) = (tanh(a / 2) + 1) / 2: one function for all gates, which XLA vectorises
    half = lambda *values: jnp.asarray(values, x.dtype).reshape(1, 4, 1)
    scale, shift = half(0.5, 0.5, 1, 0.5), half(0.5, 0.5, 0, 0.5)

    def step(carry, x):
        h, c = carry
        gates = scale * jnp.tanh(scale * (x + h @ w).reshape(-1, 4, width)) + shift
        i, f, g, o = (gates[:, k] for k in range(4))
        c = f * c + i * g
        h = o * jnp.tanh(c)
        return (h, c), (h, c, gates)

    zero = jnp.zeros((x.shape[1], width), x.dtype)
    return lax.scan(step, (zero, zero), x, unroll=UNROLL)[1]


@lstm.defjvp
def _lstm_jvp(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    h, c, gates = _forward(x, w)
    i, f, g, o = (gates[:, :, k] for k in range(4))
    before = lambda v: jnp.concatenate([jnp.zeros_like(v[:1]), v[:-1]])
    slope, tanh_c, none = (lambda s: s * (1 - s)), jnp.tanh(c), jnp.zeros_like(i)
    p = jnp.stack([slope(i) * g, slope(f) * before(c), i * (1 - g * g), none], axis=2)
    q = jnp.stack([none, none, none, slope(o) * tanh_c], axis=2)
    r = o * (1 - tanh_c * tanh_c)
    da = (dx + before(h) @ dw).reshape(gates.shape)
    # In reverse, which is the common way, the loop's product is then of untransposed matrices.
    turned = lax.optimization_barrier(w.T)

    def step(carry, t):
        dh, dc = carry
        da, f, p, q, r = t
        da += lax.dot_general(dh, turned, (((1,), (1,)), ((), ()))).reshape(da.shape)
        dc = f * dc + jnp.sum(p * da, axis=1)
        dh = r * dc + jnp.sum(q * da, axis=1)
        return (dh, dc), dh

    zero = jnp.zeros_like(h[0])
    return h, lax.scan(step, (zero, zero), (da, f, p, q, r), unroll=UNROLL)[1]
