"""CIE L*a*b*, in which a colour's lightness and hue are apart, and images moved in it (LAB).

Reinhard et al., "Color transfer between images" (2001), as FedDrive has it (Fani's thesis, eq.
5.16; Caldarola's, eq. 6.1). Of an image, mu and sigma are mean and deviation of each channel; T is
whose style it takes:

    x  <-  sigma_T / sigma (x - mu) + mu_T

A channel without any spread becomes mu_T. sRGB and L*a*b* under D65 are those of the standard, with
OpenCV's constants; the released program computes in 8-bit L*a*b*, here nothing is rounded before
the image is stored. Colours that no screen has are clipped.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_XYZ = np.array([[0.412453, 0.357580, 0.180423],
                 [0.212671, 0.715160, 0.072169],
                 [0.019334, 0.119193, 0.950227]])
_WHITE = np.array([0.950456, 1.0, 1.088754])
_KNEE = 6 / 29


class Spread(NamedTuple):
    """Mean and deviation of L*, a* and b*: the six numbers that are an image's style."""

    mean: jax.Array
    deviation: jax.Array


def lab_of(rgb: jax.Array) -> jax.Array:
    """L* in 0 .. 100, a* and b* about -127 .. 127, of sRGB in 0 .. 1 (last axis)."""
    bent = ((jnp.maximum(rgb, 0.04045) + 0.055) / 1.055) ** 2.4
    linear = jnp.where(rgb <= 0.04045, rgb / 12.92, bent)
    t = _times(linear, _XYZ / _WHITE[:, None])
    f = jnp.where(t > _KNEE**3, jnp.cbrt(t), t / (3 * _KNEE**2) + 4 / 29)
    x, y, z = f[..., 0], f[..., 1], f[..., 2]
    return jnp.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=-1)


def rgb_of(lab: jax.Array) -> jax.Array:
    """The inverse, clipped to 0 .. 1."""
    y = (lab[..., 0] + 16) / 116
    f = jnp.stack([y + lab[..., 1] / 500, y, y - lab[..., 2] / 200], axis=-1)
    t = jnp.where(f > _KNEE, f**3, 3 * _KNEE**2 * (f - 4 / 29))
    linear = jnp.maximum(_times(t, np.linalg.inv(_XYZ) * _WHITE[None, :]), 0)
    bent = 1.055 * jnp.maximum(linear, 0.0031308) ** (1 / 2.4) - 0.055
    return jnp.clip(jnp.where(linear <= 0.0031308, 12.92 * linear, bent), 0, 1)


def spread(rgb: jax.Array) -> Spread:
    """Of an image in 0 .. 1."""
    return _spread(lab_of(rgb))


def moved(rgb: jax.Array, to: Spread) -> jax.Array:
    """An image in 0 .. 1 with the mean and the deviation of another."""
    lab = lab_of(rgb)
    own = _spread(lab)
    # Rounding leaves a channel of one value a deviation of about 1e-5.
    there = own.deviation > 1e-4
    gain = jnp.where(there, to.deviation / jnp.where(there, own.deviation, 1.0), 0.0)
    channels = (1,) * (lab.ndim - 1) + (3,)
    scaled = gain.reshape(channels) * (lab - own.mean.reshape(channels))
    return rgb_of(scaled + to.mean.reshape(channels))


def _spread(lab: jax.Array) -> Spread:
    pixels = lab.reshape(-1, 3)
    return Spread(jnp.mean(pixels, axis=0), jnp.std(pixels, axis=0))


def _times(colours: jax.Array, matrix: np.ndarray) -> jax.Array:
    rows = jnp.asarray(matrix.T, jnp.float32)
    return jnp.matmul(colours, rows, precision="highest")
