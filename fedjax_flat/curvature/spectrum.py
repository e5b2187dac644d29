"""Eigenvalues of a symmetric operator that is known by its products only.

`lanczos`: Krylov subspace with full re-orthogonalisation; the largest algebraic eigenvalues.
`power_iteration`: the papers' method, one eigenvalue after the other by deflation; the largest in
magnitude. `density`: stochastic Lanczos quadrature. `trace`: Hutchinson.

An operator is `product(vector) -> vector` on flat vectors; `flat_hessian` makes one of a DataLoss.
Loops are in Python, one product per turn, so that they can show progress and be stopped: the
`Found` that is handed to `after_step` starts them again where they were, bit for bit.

A residual is ||H v - lambda v|| of a vector that is returned, by a product of its own. What Lanczos
knows without one, |beta_m s_m| of the last row, holds in exact arithmetic: it falls far below what
rounding leaves. It is called an estimate.

The basis of Lanczos is depth x parameters. It is kept on the device if it fits, else on the host.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedjax_flat import errors, memory
from fedjax_flat.curvature.data_loss import DataLoss

logger = logging.getLogger("fedjax_flat")
Product = Callable[[jax.Array], jax.Array]
Progress = Callable[[Iterable[int]], Iterable[int]]
ROWS = 20  # of a Lanczos basis in one block


class Operator(NamedTuple):
    """A symmetric matrix of `size` rows."""

    product: Product
    size: int
    dtype: Any
    unravel: Callable[[jax.Array], Any]


class Spectrum(NamedTuple):
    """Eigenvalues, largest first; the eigenvectors that were asked for, with ||H v - lambda v||."""

    values: np.ndarray
    vectors: jax.Array  # one per row
    residuals: np.ndarray  # one per vector
    converged: np.ndarray  # whether the residual is small, or the estimate where there is none
    estimates: np.ndarray  # of all residuals, without rounding; power iteration: the residuals
    products: int  # power iteration that went on: since then


class Found(NamedTuple):
    """What a solver has after some of its steps, one row each: a unit vector and two numbers.

    Lanczos: the next vector of the basis, diagonal and off-diagonal. Power iteration: an
    eigenvector, its eigenvalue, its residual (negative if not converged).
    """

    vectors: np.ndarray
    first: np.ndarray
    second: np.ndarray


AfterStep = Callable[[np.ndarray, float, float], None]  # one row of Found


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
    hessian = loss.hessian(params)
    product = lambda v: ravel_pytree(hessian(unravel(v)))[0]
    return Operator(product, flat.size, flat.dtype, unravel)


def lanczos(
    operator: Operator,
    top: int,
    *,
    key: jax.Array,
    depth: int | None = None,
    tolerance: float = 1e-3,
    vectors: int | None = None,
    basis_in: str = "auto",
    start: Found | None = None,
    after_step: AfterStep | None = None,
    progress: Progress = lambda steps: steps,
) -> Spectrum:
    """The `top` largest eigenvalues; stops early once all estimates are <= tolerance |lambda|.

    Of their eigenvectors the first `vectors` are made (by default all): a product each, for the
    residual.
    """
    _check_top(top, operator.size)
    if vectors is not None and not 0 <= vectors <= top:
        raise errors.UsageError(f"vectors = {vectors} of {top} eigenvalues: expected 0 to {top}.")
    depth = min(operator.size, depth or max(4 * top, top + 20))
    errors.at_least("depth", depth, top)
    basis, alphas, betas = _krylov(
        operator, key, depth, basis_in=basis_in, progress=progress, stop=_Stop(top, tolerance),
        start=start, after_step=after_step,
    )
    theta, s = np.linalg.eigh(_tridiagonal(alphas, betas[:-1]))
    order = np.argsort(theta)[::-1][:top]
    values, estimates = theta[order], np.abs(betas[-1] * s[-1, order])
    made = jnp.asarray(basis.combine(s[:, order[:vectors]].T.astype(operator.dtype)))
    checked = progress(range(len(made))) if len(made) else ()
    residuals = np.array([_residual(operator, values[k], made[k]) for k in checked])
    known = np.concatenate([residuals, estimates[len(made) :]])
    converged = known <= tolerance * np.abs(values)
    return Spectrum(values, made, residuals, converged, estimates, len(alphas) + len(made))


def power_iteration(
    operator: Operator,
    top: int,
    *,
    key: jax.Array,
    iterations: int = 20,
    tolerance: float = 1e-4,
    start: Found | None = None,
    after_step: AfterStep | None = None,
    progress: Progress = lambda steps: steps,
) -> Spectrum:
    """The `top` eigenvalues of largest magnitude, each by at most `iterations` products.

    H is deflated by the eigenpairs found before. An eigenvalue counts as converged when its last
    relative change was below `tolerance`, as in the papers; its residual tells how far it is.
    """
    _check_top(top, operator.size)
    errors.at_least("iterations", iterations, 1)
    values = jnp.zeros(top, operator.dtype)
    vectors = jnp.zeros((top, operator.size), operator.dtype)
    residuals, converged, products = np.zeros(top), np.zeros(top, bool), 0
    for k, (vector, value, residual) in enumerate(zip(*start, strict=True) if start else ()):
        values, vectors = values.at[k].set(value), vectors.at[k].set(vector)
        residuals[k], converged[k] = abs(residual), not np.signbit(residual)
    for k in progress(range(len(start.first) if start else 0, top)):
        vector = _random_unit(jax.random.fold_in(key, k), operator)
        with _exact():
            vector = _unit(_without(vectors, vector))
        last = None
        for _ in range(iterations):
            estimate, following, residual = _power_step(
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
        if after_step:
            signed = residuals[k] if done else -residuals[k]
            after_step(np.asarray(here), float(estimate), signed)
    order = np.argsort(np.asarray(values))[::-1]
    found = residuals[order]
    return Spectrum(
        np.asarray(values)[order], vectors[order], found, converged[order], found, products
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
        moved = operator.product(signs)
        with _exact():
            samples.append(float(jnp.vdot(signs, moved)))
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


def _krylov(
    operator, key, depth, *, basis_in="auto", progress=lambda steps: steps, stop=None, start=None,
    after_step=None,
):
    """(basis, diagonal, off-diagonal with the last residual norm)."""
    size = depth * operator.size * np.dtype(operator.dtype).itemsize
    where = memory.place(
        "basis_in", basis_in, size, memory.free(),
        what=f"a Lanczos basis of {depth} vectors of {operator.size} parameters",
        advice="Ask for fewer eigenvalues, a smaller depth, or the method without a basis, power.",
    )
    if where != "device":
        logger.info("Lanczos basis: %s, in host memory", memory.gigabytes(size))
    basis = _Basis(operator, depth, where)
    basis.append(_random_unit(key, operator), 1.0)
    alphas, betas = ([], []) if start is None else (list(start.first), list(start.second))
    for vector in [] if start is None else start.vectors[: depth - 1]:
        basis.append(vector, 1.0)
    for j in progress(range(len(alphas), depth)):
        if alphas and _is_over(operator, alphas, betas, stop):
            break
        alpha, beta, rest = basis.step(operator.product(jnp.asarray(basis.row(j))), j)
        alphas.append(alpha)
        betas.append(beta)
        if j + 1 < depth and beta > 0:
            basis.append(rest, beta)
        if after_step:
            after_step(np.asarray(basis.row(-1)), alpha, beta)
    if _broken_down(operator, alphas, betas):  # an invariant subspace: every Ritz value is exact
        betas[-1] = 0.0
    return basis, alphas, betas


class _Basis:
    """Orthonormal rows, in blocks: a step reads those that are there, not all that may come."""

    def __init__(self, operator: Operator, depth: int, where: str):
        self._blocks: list[Any] = []
        self._rows = 0
        on_device = where == "device"
        zeros = jnp.zeros if on_device else np.zeros
        shape = lambda: (min(ROWS, depth - self._rows), operator.size)
        self._new = lambda: zeros(shape(), operator.dtype)
        self._here = jnp.asarray if on_device else np.asarray
        self._store = _store_on_device if on_device else _store_on_host
        self._without = _without_on_device if on_device else _without

    def append(self, vector, length) -> None:
        """One row more: vector / length."""
        row = self._rows % ROWS
        if row == 0:
            self._blocks.append(self._new())
        self._blocks[-1] = self._store(self._blocks[-1], vector, length, row)
        self._rows += 1

    def row(self, j: int):
        """Row j; -1 is the last."""
        j %= self._rows
        return self._blocks[j // ROWS][j % ROWS]

    def step(self, product, j: int):
        """(alpha, beta, what is left of the product beside the basis)."""
        rest = self._here(product)
        with _exact():
            alpha = float(self.row(j) @ rest)
            for _ in range(2):  # twice is enough
                for block in self._blocks:
                    rest = self._without(block, rest)
            return alpha, math.sqrt(rest @ rest), rest

    def combine(self, rotation: np.ndarray):
        """rotation @ rows, for as many rows as it has columns."""
        with _exact():
            return sum(
                rotation[:, i * ROWS : (i + 1) * ROWS] @ block[: rotation.shape[1] - i * ROWS]
                for i, block in enumerate(self._blocks)
            )


def _exact():
    """Products of float32 as such: by default TPUs round their factors to bfloat16."""
    return jax.default_matmul_precision("highest")


def _without(rows, vector):
    return vector - rows.T @ (rows @ vector)


_without_on_device = jax.jit(_without)


@functools.partial(jax.jit, donate_argnums=0)
def _store_on_device(rows, vector, length, row):
    return rows.at[row].set(vector / length)


def _store_on_host(rows, vector, length, row):
    rows[row] = np.asarray(vector) / length
    return rows


def _is_over(operator, alphas, betas, stop) -> bool:
    return _broken_down(operator, alphas, betas) or bool(stop and stop.reached(alphas, betas))


def _broken_down(operator, alphas, betas) -> bool:
    scale = max(map(abs, (*alphas, *betas)))
    return betas[-1] <= 10 * float(jnp.finfo(operator.dtype).eps) * scale


@jax.jit
def _power_step(product, vector, values, vectors):
    """One step with the deflated matrix: (estimate, next vector, residual)."""
    with _exact():
        moved = product - vectors.T @ (values * (vectors @ vector))
        estimate = jnp.vdot(vector, moved)
    residual = jnp.linalg.norm(product - estimate * vector)
    length = jnp.linalg.norm(moved)
    return estimate, jnp.where(length > 0, moved / _safe(length), vector), residual


def _residual(operator: Operator, value: float, vector: jax.Array) -> float:
    """||H v - lambda v||."""
    v, hv = (np.asarray(x, np.float64) for x in (vector, operator.product(vector)))
    return float(np.linalg.norm(hv - value * v))


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
