"""Fed3R: ridge regression on the features of a frozen network, from sums over clients.

Fani, Camoriano, Caputo, Ciccone, "Accelerating heterogeneous federated learning with closed-form
classifiers" (ICML 2024); Fani, PhD thesis (Politecnico di Torino, 2025), algorithms 3 to 6. Z_k are
the features of client k's examples, one a row, Y_k their labels, one-hot:

    client k    A_k = Z_k^T Z_k,     b_k = Z_k^T Y_k
    server      A = lambda I + sum of A_k,     b = sum of b_k,     W = A^-1 b
                W^c <- W^c / ||W^c||           for every class c (`normalised`)

W is the classifier's kernel, and its bias is 0. `bias` appends a constant 1 to the features, whose
row of W becomes the bias (equation 3.9); the norm is then of the whole column. variant="released",
after the authors' code: with a bias, and the norm of the column without the bias's row.

A client sends the upper triangle of A_k and the columns of b_k of its own classes; with `sync`, all
columns, which hides its classes in a secure sum. The classifier is the same.

Fed3R-RF is Fed3R of a model with random features (models/random_features.py): `fed3r_rf` has 5,000
of them unless model.random.features says otherwise.

A is solved by Cholesky's factors in float64. Statistics are float32, so that with lambda = 0 a
smallest pivot below d 2^-24 of the largest diagonal entry counts as singular: the classifier is
then not finite. A class that nobody has yet has W^c = 0. The recursive form that gives the method
its name (equation 3.15) needs the examples themselves; it is only a test here.
"""

import jax
import jax.numpy as jnp

from fedjax_flat import errors
from fedjax_flat.algorithms.base import Algorithm
from fedjax_flat.algorithms.closed_form import Head, Total, closed_form
from fedjax_flat.algorithms.method import Method
from fedjax_flat.client import Client
from fedjax_flat.settings import Setting

FLOAT = 4  # bytes
ADVICE = (
    "A + lambda I is singular, or not positive definite in float32: fewer examples than features, "
    "features that are not finite, or a lambda that rounding swallows. Raise "
    "algorithm.fed3r.ridge, e.g. to 0.01, or let more clients take part at first (cohort.size)."
)


def fed3r(
    client: Client,
    *,
    ridge: float = 0.01,
    normalised: bool = True,
    bias: bool = False,
    sync: bool = False,
    variant: str = "paper",
    prior: Total | None = None,
) -> Algorithm:
    """Fed3R; `prior` are the sums of a run before it, to which new clients' are added."""
    errors.at_least("ridge", ridge, 0)
    norm_rows = errors.lookup("variant", variant, {"paper": None, "released": -1})
    bias = bias or variant == "released"

    def bits(sent):
        d, classes = next(x.shape for name, x in sent.items() if name.endswith("/b"))
        return 8 * FLOAT * (triangle(d) + d * classes)

    def own_classes(sums, clients, classes):
        d = sums.high["A"].shape[0]
        return {"bytes_up": FLOAT * (clients * triangle(d) + classes * d)}

    return closed_form(
        client,
        lambda z, y: statistics(z, y, bias=bias),
        lambda sums: solve(sums, ridge=ridge, normalised=normalised, bias=bias, rows=norm_rows),
        bits=bits,
        metrics=None if sync else own_classes,
        advice=ADVICE,
        prior=prior,
    )


def statistics(z: jax.Array, y: jax.Array, *, bias: bool = False) -> dict[str, jax.Array]:
    """A and b of some examples; rows that are zero in both count nowhere."""
    if bias:
        z = jnp.concatenate([z, jnp.sum(y, axis=1, keepdims=True)], axis=1)
    product = lambda a, b: jnp.matmul(a.T, b, precision=jax.lax.Precision.HIGHEST)
    return {"A": product(z, z), "b": product(z, y)}


def solve(
    sums: Total, *, ridge: float, normalised: bool = True, bias: bool = False,
    rows: int | None = None,
) -> Head:
    """W = (A + lambda I)^-1 b, its columns normalised over the first `rows` rows if asked."""
    with jax.enable_x64(True):
        A, b = (sums.in_float64()[name] for name in ("A", "b"))
        d = A.shape[0]
        A = A + ridge * jnp.eye(d, dtype=A.dtype)
        factor = jax.lax.linalg.cholesky(A, symmetrize_input=False)  # not finite if indefinite
        W = jax.scipy.linalg.cho_solve((factor, True), b)
        if not ridge:
            least = d * 2.0**-24 * jnp.max(jnp.diag(A))
            W = jnp.where(jnp.min(jnp.diag(factor)) ** 2 > least, W, jnp.nan)
        if normalised:
            norms = jnp.linalg.norm(W[:rows], axis=0, keepdims=True)
            W = W / jnp.where(norms > 0, norms, 1)
        W = W.astype(jnp.float32)
    return (W[:-1], W[-1]) if bias else (W, jnp.zeros(W.shape[1], jnp.float32))


def triangle(d: int) -> int:
    """Entries of the upper triangle of a (d, d) matrix, with its diagonal."""
    return d * (d + 1) // 2


_SETTINGS = {
    "ridge": Setting(0.01, "lambda", at_least=0),
    "normalised": Setting(True, "columns of the classifier, to length 1"),
    "bias": Setting(False, "a constant feature, whose weights are the bias"),
    "sync": Setting(False, "clients send all classes' columns, for a secure sum"),
    "variant": Setting("paper", "or a bias outside the norm", choices=("paper", "released")),
}
METHOD = tuple(
    Method(
        name, "Fani 2024", summary, lambda p: fed3r(p.client, **p.settings), _SETTINGS, "fed3r",
        optimizer="own", sharpness="no steps", weighs=False,
    )
    for name, summary in (
        ("fed3r", "ridge regression on frozen features"),
        ("fed3r_rf", "the same on random features of them"),
    )
)
