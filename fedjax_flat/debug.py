"""The one debug switch: the same maths without jit, checked for finite values step by step.

`with debug.checks():` runs everything op by op; `check(tree, **where)` then raises with the place
and the first tensor that is not finite. Outside the switch `check` does nothing at all.
"""

import contextlib
import contextvars

import jax
import numpy as np

from fedjax_flat import errors

_on = contextvars.ContextVar("fedjax_flat_debug", default=False)


@contextlib.contextmanager
def checks():
    """Turns compilation off and the finite checks on."""
    token = _on.set(True)
    try:
        with jax.disable_jit():
            yield
    finally:
        _on.reset(token)


def check(tree, **where) -> None:
    """In debug mode, raises if a floating tensor of `tree` is not finite."""
    if not _on.get():
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.core.Tracer):  # being traced for shapes, without values
            return
        value = np.asarray(leaf)
        if np.issubdtype(value.dtype, np.floating) and not np.isfinite(value).all():
            place = ", ".join(f"{name} {np.asarray(v)}" for name, v in where.items())
            bad = value[~np.isfinite(value)]
            raise errors.DivergedError(
                f"not finite at {place}: {jax.tree_util.keystr(path, simple=True, separator='/')} "
                f"(shape {value.shape}, {bad.size} of {value.size} values, first {bad[0]})."
            )
