"""A long short-term memory whose loops hold nothing but what depends on the step before.

Hochreiter and Schmidhuber (1997), with the forget gate of Gers et al. (2000), as in PyTorch:

    a_t = x_t + h_{t-1} W                        four gates, a_t = (i, f, g, o)
    c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g)
    h_t = sigmoid(o) tanh(c_t)

where x_t are the inputs after their own weights and biases, one matrix product for all steps.

JAX's gradient of this loop adds to that of W in every step, a few rows at a time. Here the
derivative is written out. It is the linear recurrence L(u, v, z),

    a_t = u_t + k_{t-1} W
    s_t = f_t s_{t-1} + sum over gates of p_t a_t + v_t
    k_t = r_t s_t + sum over gates of q_t a_t + z_t

of u_t = dx_t + h_{t-1} dW, v = z = 0, with p, q, r from the values of all steps: a, s and k are
then the tangents of the gates' arguments, of c and of h. u is one product for all steps, hence so
is W's gradient, its transpose. L's own tangents are L again, of the sources

    (u' + before(k) W',   v' + f' before(s) + sum p' a,   z' + r' s + sum q' a)

and likewise those of its transpose, which runs in reverse. So derivatives of any order, forward and
backward, are three loops, each a primitive (`primitive.py`), which kernels.py may have compiled.

Arrays of a loop are (T, B, 6, H): four gates, c and h, or what is tangent or dual to them. Where
only the gates' four fields or only that of h are needed, as in a first derivative, they are alone.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_flat.ops import kernels
from fedjax_flat.ops.primitive import Operation, primitive
from fedjax_flat.ops.product import product

UNROLL = 1  # steps per turn of a loop: more were no faster, and slower to compile
FEWEST = 16  # units of the state that compiled loops take at a time


@jax.custom_jvp
def lstm(x: jax.Array, w: jax.Array) -> jax.Array:
    """x (T, B, 4 H) and w (H, 4 H) -> h (T, B, H), from a state of zeros."""
    return _states(x, w)[:, :, 5]


@lstm.defjvp
def _lstm_jvp(primals, tangents):
    states = _states(*primals)
    return states[:, :, 5], _tangent(states, primals, tangents, 1)[:, :, 0]


@jax.custom_jvp
def _states(x, w):
    return _forward_p.bind(x, w)


@_states.defjvp
def _states_jvp(primals, tangents):
    states = _states(*primals)
    i, f, g, o, c, _ = (states[:, :, k] for k in range(6))
    one = jnp.ones_like(c)
    slopes = jnp.stack([_slope(i), _slope(f), 1 - g * g, _slope(o), one, one], axis=2)
    return states, slopes * _tangent(states, primals, tangents, 6)


def _tangent(states, primals, tangents, fields):
    """Of the gates' arguments, c and h, or of h only."""
    (_, w), (dx, dw) = primals, tangents
    u = dx + product(_before(states[:, :, 5]), dw)
    return _linear(u.reshape(*dx.shape[:2], 4, len(w)), states, w, fields)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _linear(sources, states, w, fields):
    """L: a, s and k."""
    return _linear_p.bind(sources, states, w, fields=fields)


@_linear.defjvp
def _linear_jvp(fields, primals, tangents):
    (sources, states, w), (d_sources, d_states, dw) = primals, tangents
    out = _linear(sources, states, w, 6)
    a, s, k = _split(out)
    df, dp, dq, dr = jax.jvp(_coefficients, (states,), (d_states,))[1]
    du = product(_before(k), dw).reshape(a.shape)
    dv = df * _before(s) + jnp.sum(dp * a, axis=2)
    dz = dr * s + jnp.sum(dq * a, axis=2)
    return _some(out, fields), _linear(_all(d_sources) + _joined(du, dv, dz), states, w, fields)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _reverse(sources, states, w, fields):
    """L's transpose, and L's of the same sources: A_t = u_t + p_t S_t + q_t K_t, with

        K_t = z_t + A_{t+1} W^T,    S_t = v_t + r_t K_t + f_{t+1} S_{t+1}
    """
    return _reverse_p.bind(sources, states, w, fields=fields)


@_reverse.defjvp
def _reverse_jvp(fields, primals, tangents):
    (sources, states, w), (d_sources, d_states, dw) = primals, tangents
    out = _reverse(sources, states, w, 6)
    a, s, k = _split(out)
    df, dp, dq, dr = jax.jvp(_coefficients, (states,), (d_states,))[1]
    du = dp * s[:, :, None] + dq * k[:, :, None]
    dv = dr * k + _after(df * s)
    dz = product(_after(a.reshape(*a.shape[:2], dw.shape[1])), dw.T)
    return _some(out, fields), _reverse(_all(d_sources) + _joined(du, dv, dz), states, w, fields)


def _coefficients(states):
    """f and r (T, B, H), p and q (T, B, 4, H), in the order f, p, q, r."""
    i, f, g, o, c, _ = (states[:, :, k] for k in range(6))
    tanh_c, none = jnp.tanh(c), jnp.zeros_like(c)
    p = jnp.stack([_slope(i) * g, _slope(f) * _before(c), i * (1 - g * g), none], axis=2)
    q = jnp.stack([none, none, none, _slope(o) * tanh_c], axis=2)
    return f, p, q, o * (1 - tanh_c * tanh_c)


def _all(x):
    """Six fields from six, from the four of the gates, or from that of h, the others being zero."""
    fields = x.shape[2]
    return jnp.pad(x, ((0, 0), (0, 0), (5 * (fields == 1), 2 * (fields == 4)), (0, 0)))


def _some(x, fields):
    """All six, the four of the gates, or that of h."""
    return x[:, :, 5:] if fields == 1 else x[:, :, :fields]


def _split(x):
    """The gates' part and those of c and h."""
    return x[..., :4, :], x[..., 4, :], x[..., 5, :]


def _joined(gates, c, h):
    return jnp.concatenate([gates, jnp.expand_dims(c, -2), jnp.expand_dims(h, -2)], axis=-2)


def _slope(sigmoid):
    return sigmoid * (1 - sigmoid)


def _before(x):
    return jnp.concatenate([jnp.zeros_like(x[:1]), x[:-1]])


def _after(x):
    return jnp.concatenate([x[1:], jnp.zeros_like(x[:1])])


def _forward_scan(x, w):
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
        return (h, c), (gates, c, h)

    zero = jnp.zeros((x.shape[1], width), x.dtype)
    return _joined(*lax.scan(step, (zero, zero), x, unroll=UNROLL)[1])


def _linear_scan(sources, states, w, fields):
    # In reverse, which is the common way, the loop's product is then of untransposed matrices.
    turned = lax.optimization_barrier(w.T)

    def step(carry, t):
        k, s = carry
        (u, v, z), (f, p, q, r) = t
        a = u + lax.dot_general(k, turned, (((1,), (1,)), ((), ()))).reshape(u.shape)
        s = f * s + jnp.sum(p * a, axis=1) + v
        k = r * s + jnp.sum(q * a, axis=1) + z
        return (k, s), (a, s, k)

    zero = jnp.zeros_like(states[0, :, 5])
    sequences = (_split(_all(sources)), _coefficients(states))
    return _some(_joined(*lax.scan(step, (zero, zero), sequences, unroll=UNROLL)[1]), fields)


def _reverse_scan(sources, states, w, fields):
    of = jax.ShapeDtypeStruct((*states.shape[:2], fields, len(w)), states.dtype)
    linear = lambda x: _linear_scan(x, states, w, sources.shape[2])
    return jax.linear_transpose(linear, of)(sources)[0]


def _loop(name, scan, transposes):
    """One of the three loops as a primitive, with as many fields in its result as `fields` says."""

    def on_cpu(*arrays, **static):
        *sequences, w = arrays
        if w.dtype != np.float32 or len(w) < FEWEST or kernels.name() == "jax":
            return scan(*arrays, **static)
        shape = (*sequences[0].shape[:2], static.get("fields", 6), len(w))
        return kernels.handler(name, jax.ShapeDtypeStruct(shape, w.dtype))(*arrays)

    def batch(p, arrays, axes, **static):
        """Several batches are one; of several weights, each has a loop of its own on CPU."""
        size = next(x.shape[a] for x, a in zip(arrays, axes, strict=True) if a is not None)
        move = lambda x, a, to: (
            jnp.repeat(jnp.expand_dims(x, to), size, to) if a is None else jnp.moveaxis(x, a, to)
        )
        *sequences, w = arrays
        if axes[-1] is not None:
            first = [move(x, a, 0) for x, a in zip(arrays, axes, strict=True)]
            each = lambda *arrays: lax.map(lambda t: p.bind(*t, **static), arrays)
            batched = jax.vmap(functools.partial(scan, **static))
            return lax.platform_dependent(*first, cpu=each, default=batched), 0
        joined = [
            lax.collapse(move(x, a, 1), 1, 3) for x, a in zip(sequences, axes[:-1], strict=True)
        ]
        out = p.bind(*joined, w, **static)
        return out.reshape(len(out), size, -1, *out.shape[2:]), 1

    return primitive(name, scan, transposes, cpu=on_cpu, batch=batch)


_forward_p: Operation = _loop("lstm_forward", _forward_scan, [None, None])
_linear_p: Operation = _loop("lstm_linear", _linear_scan, [
    lambda ct, x, states, w, fields: _reverse(ct, states, w, x.aval.shape[2]), None, None,
])
_reverse_p: Operation = _loop("lstm_reverse", _reverse_scan, [
    lambda ct, x, states, w, fields: _linear(ct, states, w, x.aval.shape[2]), None, None,
])
