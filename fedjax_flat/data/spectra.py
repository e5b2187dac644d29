"""FDA: the low frequencies of an image's amplitudes are its style, and can be another's.

Yang and Soatto, "FDA: Fourier domain adaptation for semantic segmentation" (CVPR 2020); Fani's
thesis, eq. 5.11 to 5.15. Of every channel, F is the Fourier transform with the constant in the
middle, A = |F| its amplitude, Phi its phase, and M a window of `rows` x `columns` around the
constant. The style S of another image takes the place of part of A:

    x  <-  Re IFFT((strength M S + (1 - strength) M A + (1 - M) A) e^(i Phi))

Only frequencies in M change, so only these are computed, as products with the rows of the Fourier
matrix that they are of. What comes back is real: where M has an even side, it has a frequency
without its opposite, and the imaginary part is dropped.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_flat import errors

RULES = ("half", "printed", "square")


class Window(NamedTuple):
    """So many rows and columns of low frequencies, of images of `shape` (height, width)."""

    rows: int
    columns: int
    shape: tuple[int, int]


def window(height: int, width: int, share: float, rule: str = "half") -> Window:
    """The frequencies that are low.

    half: floor(share * side) to each side of the constant (FedDrive's program); printed: a window
    of floor(share * side), the thesis' M; square: floor(share * the smaller side) to each side.
    """
    errors.lookup("rule of a band", rule, dict.fromkeys(RULES))
    if rule == "printed":
        return _inside(int(share * height), int(share * width), height, width, f"band = {share}")
    least = min(height, width)
    steps = [int(share * (least if rule == "square" else side)) for side in (height, width)]
    return _inside(2 * steps[0] + 1, 2 * steps[1] + 1, height, width, f"band = {share}")


def square(height: int, width: int, side: int) -> Window:
    """`side` x `side` frequencies with the constant in the middle."""
    if side < 1 or side % 2 == 0:
        raise errors.UsageError(
            f"window = {side}: expected an odd number, 1, 3 or 5, with the constant frequency in "
            "the middle."
        )
    return _inside(side, side, height, width, f"window = {side}")


def _inside(rows: int, columns: int, height: int, width: int, what: str) -> Window:
    if not (1 <= rows <= height and 1 <= columns <= width):
        raise errors.UsageError(
            f"{what}: a window of {rows}x{columns} frequencies in images of {height}x{width}: "
            f"expected 1x1 to {height}x{width}."
        )
    return Window(rows, columns, (height, width))


def amplitudes(image: jax.Array, low: Window) -> jax.Array:
    """A in the window, (rows, columns, channels)."""
    return jnp.abs(_transformed(image, low))


def restyled(image: jax.Array, style: jax.Array, low: Window, strength: jax.Array) -> jax.Array:
    """`image` in float32 with these amplitudes in the window."""
    found = _transformed(image, low)
    own = jnp.abs(found)
    change = strength * (style - own)
    gain = jnp.where(own > 0, change / jnp.where(own > 0, own, 1.0), 0.0)
    # The phase of 0 is 0.
    change = jax.lax.complex(jnp.where(own > 0, gain * found.real, change), gain * found.imag)
    rows, columns = _factors(low)
    back = jnp.einsum("rh,rwc->hwc", rows.conj(), jnp.einsum(
        "vw,rvc->rwc", columns.conj(), change, precision="highest"
    ), precision="highest")
    return image.astype(jnp.float32) + back.real / (low.shape[0] * low.shape[1])


def _transformed(image: jax.Array, low: Window) -> jax.Array:
    """F in the window."""
    rows, columns = _factors(low)
    x = image.astype(jnp.float32).astype(jnp.complex64)
    narrow = jnp.einsum("rh,hwc->rwc", rows, x, precision="highest")
    return jnp.einsum("vw,rwc->rvc", columns, narrow, precision="highest")


def _factors(low: Window) -> tuple[jax.Array, jax.Array]:
    """The rows of both Fourier matrices that the window has."""

    def rows(count: int, length: int) -> jax.Array:
        frequencies = np.arange(count) - count // 2
        turns = frequencies[:, None] * np.arange(length)[None, :] % length / length
        return jnp.asarray(np.exp(-2j * np.pi * turns).astype(np.complex64))

    return rows(low.rows, low.shape[0]), rows(low.columns, low.shape[1])
