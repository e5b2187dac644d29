"""The Frechet distance between two sets of features, each taken for Gaussian.

Heusel et al., "GANs trained by a two time-scale update rule converge to a local Nash equilibrium"
(NeurIPS 2017), there with features of InceptionV3:

    d^2 = ||mu_a - mu_b||^2 + tr(S_a + S_b - 2 (S_a S_b)^(1/2))

The trace of the root is the sum of the singular values of A^T B, where A A^T = S_a and B B^T = S_b
are the centred features themselves, so no root of a matrix is taken: in float64, exact for fewer
examples than features, too. S has the divisor n - 1.
"""

import numpy as np

from fedjax_flat import errors


def frechet(a: np.ndarray, b: np.ndarray) -> float:
    """d^2 of rows of features."""
    for name, x in (("first", a), ("second", b)):
        if np.ndim(x) != 2 or len(x) < 2 or np.shape(x)[1] != np.shape(b)[1]:
            raise errors.UsageError(
                f"Frechet distance: the {name} set has shape {np.shape(x)}; expected at least two "
                "rows of features, as many in both sets."
            )
    means, centred = [], []
    for x in (np.asarray(a, np.float64), np.asarray(b, np.float64)):
        means.append(x.mean(0))
        centred.append((x - means[-1]) / np.sqrt(len(x) - 1))
    left, right = centred
    traces = np.sum(left**2) + np.sum(right**2)
    # The same nonzero singular values, of a matrix no larger than the features are wide.
    if len(left) > left.shape[1]:
        left = np.linalg.qr(left, mode="r")
    if len(right) > right.shape[1]:
        right = np.linalg.qr(right, mode="r")
    root = np.linalg.svd(left @ right.T, compute_uv=False).sum()
    return float(max(0.0, np.sum((means[0] - means[1]) ** 2) + traces - 2 * root))
