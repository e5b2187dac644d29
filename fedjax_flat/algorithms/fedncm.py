"""FedNCM: the nearest class mean, of the features of a frozen network.

Legate et al., "Guiding the last layer in federated learning with pre-trained models" (NeurIPS
2023). phi are the features, n_c the examples of class c on all clients:

    client k    sum of phi(x) and number of its examples, class by class
    server      m_c = sum of phi(x) / n_c
    class of x  argmin_c ||phi(x) - m_c||  =  argmax_c  m_c . phi(x) - ||m_c||^2 / 2

The right-hand side is linear: kernel m, bias -||m||^2 / 2. With `cosine` the means have length 1
and there is no bias, so that the class is that of the smallest angle; Fani's thesis, which has
FedNCM in its tables, says only "nearest". A class that nobody has yet is never nearest: its bias is
-10^9.
"""

import jax
import jax.numpy as jnp

from fedjax_flat.algorithms.base import Algorithm
from fedjax_flat.algorithms.closed_form import Head, Total, closed_form
from fedjax_flat.algorithms.method import Method
from fedjax_flat.client import Client
from fedjax_flat.settings import Setting

NEVER = -1e9


def fedncm(client: Client, *, cosine: bool = False, prior: Total | None = None) -> Algorithm:
    """FedNCM; `prior` are the sums of a run before it, to which new clients' are added."""

    def measure(z, y):
        total = jnp.matmul(z.T, y, precision=jax.lax.Precision.HIGHEST)
        return {"features": total, "examples": jnp.sum(y, axis=0)}

    return closed_form(client, measure, lambda sums: nearest_mean(sums, cosine), prior=prior)


def nearest_mean(sums: Total, cosine: bool) -> Head:
    """The linear classifier of the nearest mean."""
    with jax.enable_x64(True):
        total = sums.in_float64()
        examples = total["examples"]
        means = total["features"] / jnp.maximum(examples, 1)[None]
        squares = jnp.sum(means**2, axis=0)
        if cosine:
            means = means / jnp.sqrt(jnp.where(squares > 0, squares, 1))[None]
        bias = jnp.where(examples > 0, 0.0 if cosine else -squares / 2, NEVER)
        return means.astype(jnp.float32), bias.astype(jnp.float32)


METHOD = Method(
    "fedncm", "Legate 2023", "nearest class mean of frozen features",
    lambda p: fedncm(p.client, **p.settings),
    {"cosine": Setting(False, "nearest by angle")},
    optimizer="own", sharpness="no steps", weighs=False,
)
