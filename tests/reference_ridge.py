"""Ridge regression, nearest means and their costs in NumPy, float64, from the thesis's equations.

One row of `x` per example; `y` are classes. Nothing of the package is imported.
"""

import numpy as np


def one_hot(y, classes):
    return np.eye(classes)[np.asarray(y)]


def normal_equations(x, y, classes, ridge, *, normalised=True, bias=False, released=False):
    """(kernel, bias) of W = (X^T X + lambda I)^-1 X^T Y, example by example."""
    x = np.asarray(x, np.float64)
    if bias or released:
        x = np.hstack([x, np.ones((len(x), 1))])
    a, b = ridge * np.eye(x.shape[1]), np.zeros((x.shape[1], classes))
    for row, label in zip(x, y, strict=True):
        a += np.outer(row, row)
        b[:, label] += row
    w = np.linalg.solve(a, b)
    if normalised:
        norm = np.linalg.norm(w[:-1] if released else w, axis=0)
        w = w / np.where(norm == 0, 1e-6, norm)
    return (w[:-1], w[-1]) if bias or released else (w, np.zeros(classes))


def recursive(batches, classes, ridge):
    """Equation 3.15 as it must be: P_0 = I / lambda, the identity in the gain, W added to."""
    d = batches[0][0].shape[1]
    p, w = np.eye(d) / ridge, np.zeros((d, classes))
    for x, y in batches:
        x = np.asarray(x, np.float64)
        gain = p @ x.T @ np.linalg.inv(np.eye(len(x)) + x @ p @ x.T)
        p = p - gain @ x @ p
        w = w + gain @ (one_hot(y, classes) - x @ w)
    return w


def class_means(x, y, classes):
    x = np.asarray(x, np.float64)
    return np.stack([x[np.asarray(y) == c].mean(axis=0) for c in range(classes)])


def random_features(x, omega, beta):
    """Equation 3.21."""
    return np.sqrt(2 / omega.shape[1]) * np.cos(np.asarray(x, np.float64) @ omega + beta)
