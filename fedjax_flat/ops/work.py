"""Multiply-adds of a function, counted from its jaxpr: convolutions and products of matrices.

Everything else (normalisation, activations, additions) is left out. A loop of known length counts
all its turns, any other one turn.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax


def multiply_adds(f: Callable[..., Any], *args: Any) -> int:
    """Of `f(*args)`; the arguments may be shapes."""
    return _of(jax.make_jaxpr(f)(*args).jaxpr)


def _of(jaxpr: Any) -> int:
    return sum(_one(equation) for equation in jaxpr.eqns)


def _one(equation: Any) -> int:
    name, params = equation.primitive.name, equation.params
    shapes = [v.aval.shape for v in equation.invars]
    out = math.prod(equation.outvars[0].aval.shape)
    if name == "conv_output":  # ours (conv.py): kernel (height, width, in, out)
        return out * math.prod(shapes[1][:-1])
    if name == "conv_general_dilated":
        return out * math.prod(shapes[1]) // shapes[1][params["dimension_numbers"].rhs_spec[0]]
    if name.startswith("lstm_"):  # ours (lstm.py): time and batch first, the weights last
        return math.prod(shapes[0][:2]) * math.prod(shapes[-1])
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return out * math.prod(shapes[0][i] for i in contracted)
    turns = params["length"] if name == "scan" else 1
    return turns * sum(map(_of, _inside(params)))


def _inside(params: dict[str, Any]) -> Iterator[Any]:
    """The jaxprs within an equation."""
    for value in params.values():
        for part in value if isinstance(value, list | tuple) else (value,):
            if hasattr(part, "eqns") or hasattr(part, "jaxpr"):
                yield getattr(part, "jaxpr", part)
