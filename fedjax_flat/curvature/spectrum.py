"""Eigenvalues of a symmetric operator that is known by its products only.

`lanczos`: Krylov subspace with full re-orthogonalisation; the largest algebraic eigenvalues, each
with its residual. `power_iteration`: the papers' method, one eigenvalue after the other by
deflation; the largest in magnitude. `density`: stochastic Lanczos quadrature. `trace`: Hutchinson.

An operator is `product(vector) -> vector` on flat vectors; `flat_hessian` makes one of a DataLoss.
Loops are in Python, one product per turn, so that they can show progress and be stopped.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedjax_flat import errors
from fedjax_flat.curvature.data_loss import DataLoss

Product = Callable[[jax.Array], jax.Array]
Progress = Callable[[Iterable[int]], Iterable[int]]


class Operator(NamedTuple):
    """A symmetric matrix of `size` rows."""

    product: Product
    size: int
    dtype: Any
    unravel: Callable[[jax.Array], Any]


class Spectrum(NamedTuple):
    """Eigenvalues, largest first, with ||H v - lambda v|| of each and whether that is small."""

    values: np.ndarray
    vectors: jax.Array  # one per row
    residuals: np.ndarray
    converged: np.ndarray
    products: int


class Density(NamedTuple):
    """Nodes and weights of one quadrature per probe; a row of weights sums to 1."""

    nodes: np.ndarray
    weights: np.ndarray

    def on(self, grid: np.ndarray, width: float) -> tuple[np.ndarray, np.ndarray]:
        """(mean, standard error over probes) of the density smoothed by Gaussians of `width`."""
        z = (grid[None, :, None] - self.nodes[:, None, :]) / width
        bumps = np.exp(-0.5 * z**2) / (width * np.sqrt(2 * np.pi))
        each = np.sum(self.weights[:, None, :] * bumps, axis=-1)
        return each.mean(0), _standard_error(each)


def flat_hessian(loss: DataLoss, params: Any) -> Operator:
    """The Hessian of `loss` at `params`, on flat vectors."""
    flat, unravel = ravel_pytree(params)
    product = lambda v: ravel_pytree(loss.product(params, unravel(v)))[0]
    return Operator(product, flat.size, flat.dtype, unravel)


def lanczos(
    operator: Operator,
    top: int,
    *,
    key: jax.Array,
    depth: int | None = None,
    tolerance: float = 1e-3,
    progress: Progress = lambda steps: steps,
) -> Spectrum:
    """The `top` largest eigenvalues; stops early once all have residual <= tolerance |lambda|."""
    _check_top(top, operator.size)
    depth = min(operator.size, depth or max(4 * top, top + 20))
    basis, alphas, betas = _krylov(operator, key, depth, progress, _Stop(top, tolerance))
    theta, s = np.linalg.eigh(_tridiagonal(alphas, betas[:-1]))
    order = np.argsort(theta)[::-1][:top]
    residuals = np.abs(betas[-1] * s[-1, order])
    vectors = jnp.asarray(s[:, order].T, operator.dtype) @ basis[: len(alphas)]
    values = theta[order]
    return Spectrum(
        values, vectors, residuals, residuals <= tolerance * np.abs(values), len(alphas)
    )


def power_iteration(
    operator: Operator,
    top: int,
    *,
    key: jax.Array,
    iterations: int = 20,
    tolerance: float = 1e-4,
    progress: Progress = lambda steps: steps,
) -> Spectrum:
    """The `top` eigenvalues of largest magnitude, each by at most `iterations` products.

    H is deflated by the eigenpairs found before. An eigenvalue counts as converged when its last
    relative change was below `tolerance`, as in the papers; its residual tells how far it is.
    """
    _check_top(top, operator.size)

    @jax.jit
    def turn(product, vector, values, vectors):
        """One step with the deflated matrix: (estimate, next vector, residual)."""
        found = vectors @ vector
        moved = product - vectors.T @ (values * found)
        estimate = jnp.vdot(vector, moved)
        residual = jnp.linalg.norm(moved - estimate * vector)
        length = jnp.linalg.norm(moved)
        return estimate, jnp.where(length > 0, moved / _safe(length), vector), residual

    values = jnp.zeros(top, operator.dtype)
    vectors = jnp.zeros((top, operator.size), operator.dtype)
    residuals, converged, products = np.zeros(top), np.zeros(top, bool), 0
    for k in progress(range(top)):
        vector = _random_unit(jax.random.fold_in(key, k), operator)
        vector = _unit(vector - vectors.T @ (vectors @ vector))
        last = None
        for _ in range(iterations):
            estimate, following, residual = turn(
                operator.product(vector), vector, values, vectors
            )
            products += 1
            estimate = float(estimate)
            done = last is not None and abs(estimate - last) <= tolerance * abs(estimate)
            last, here, vector = estimate, vector, following
            if done:
                break
        values, vectors = values.at[k].set(last), vectors.at[k].set(here)
        residuals[k], converged[k] = float(residual), done
    order = np.argsort(np.asarray(values))[::-1]
    return Spectrum(
        np.asarray(values)[order], vectors[order], residuals[order], converged[order], products
    )


def density(
    operator: Operator,
    *,
    key: jax.Array,
    probes: int = 5,
    depth: int = 80,
    progress: Progress = lambda steps: steps,
) -> Density:
    """The spectral density by Gauss quadrature of `probes` random Krylov spaces."""
    errors.at_least("probes", probes, 1)
    depth = min(depth, operator.size)
    nodes, weights = np.zeros((2, probes, depth))
    for p in progress(range(probes)):
        _, alphas, betas = _krylov(operator, jax.random.fold_in(key, p), depth)
        theta, s = np.linalg.eigh(_tridiagonal(alphas, betas[:-1]))
        nodes[p, : len(theta)], weights[p, : len(theta)] = theta, s[0] ** 2
        nodes[p, len(theta) :] = theta[0]  # broken down early: weight 0 from here on
    return Density(nodes, weights)


def trace(
    operator: Operator,
    *,
    key: jax.Array,
    probes: int = 20,
    progress: Progress = lambda steps: steps,
) -> tuple[float, float]:
    """(estimate, standard error) of the trace from random signs."""
    errors.at_least("probes", probes, 2)
    samples = []
    for p in progress(range(probes)):
        signs = jax.random.rademacher(
            jax.random.fold_in(key, p), (operator.size,), operator.dtype
        )
        samples.append(float(jnp.vdot(signs, operator.product(signs))))
    return float(np.mean(samples)), float(_standard_error(np.array(samples)))


class _Stop(NamedTuple):
    """Whether the `top` Ritz values of a tridiagonal matrix have settled."""

    top: int
    tolerance: float

    def reached(self, alphas: list[float], betas: list[float]) -> bool:
        if len(alphas) < self.top + 2 or len(alphas) % 5:
            return False
        theta, s = np.linalg.eigh(_tridiagonal(alphas, betas[:-1]))
        order = np.argsort(theta)[::-1][: self.top]
        return bool(
            np.all(np.abs(betas[-1] * s[-1, order]) <= self.tolerance * np.abs(theta[order]))
        )


def _krylov(operator, key, depth, progress=lambda steps: steps, stop=None):
    """(orthonormal rows, diagonal, off-diagonal with the last residual norm)."""

    @jax.jit
    def turn(product, basis, j):
        vector = basis[j]
        alpha = jnp.vdot(vector, product)
        rest = product
        for _ in range(2):  # twice is enough
            rest = rest - basis.T @ (basis @ rest)
        return alpha, jnp.linalg.norm(rest), rest

    put = jax.jit(lambda basis, rest, beta, j: basis.at[j].set(rest / beta), donate_argnums=0)
    basis = jnp.zeros((depth, operator.size), operator.dtype)
    basis = basis.at[0].set(_random_unit(key, operator))
    alphas: list[float] = []
    betas: list[float] = []
    for j in progress(range(depth)):
        alpha, beta, rest = turn(operator.product(basis[j]), basis, j)
        alphas.append(float(alpha))
        betas.append(float(beta))
        scale = max(map(abs, (*alphas, *betas)))
        broken_down = betas[-1] <= 10 * float(jnp.finfo(operator.dtype).eps) * scale
        if broken_down:  # an invariant subspace: every Ritz value is exact
            betas[-1] = 0.0
        if broken_down or j + 1 == depth or (stop and stop.reached(alphas, betas)):
            break
        basis = put(basis, rest, beta, j + 1)
    return basis, alphas, betas


def _tridiagonal(alphas, betas) -> np.ndarray:
    return np.diag(alphas) + np.diag(betas, 1) + np.diag(betas, -1)


def _random_unit(key: jax.Array, operator: Operator) -> jax.Array:
    return _unit(jax.random.normal(key, (operator.size,), operator.dtype))


def _unit(vector: jax.Array) -> jax.Array:
    return vector / _safe(jnp.linalg.norm(vector))


def _safe(length: jax.Array) -> jax.Array:
    return jnp.where(length > 0, length, 1)


def _standard_error(samples: np.ndarray) -> np.ndarray:
    """Over the first axis; 0 for a single sample."""
    n = len(samples)
    return samples.std(axis=0, ddof=1) / np.sqrt(n) if n > 1 else np.zeros(samples.shape[1:])


def _check_top(top: int, size: int) -> None:
    if not 1 <= top <= size:
        raise errors.UsageError(
            f"{top} eigenvalues of a Hessian of {size} parameters: expected 1 to {size}."
        )
