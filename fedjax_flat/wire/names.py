"""What travels, by model and name: the arrays of a message or an upload, each once.

A tree that is sent holds models, trees shaped like a model's parameters (control variates, duals)
and single arrays. To a codec each of the first two is one model: a flat dict from names like
`params/Conv_0/kernel` or `stats/batch_stats/BatchNorm_0/mean` to arrays. A single array has no name
in a model, ''. An array that a tree has in several places (FedDyn's differences, which the server
averages and sums) travels once; what is less than an array, a step count, travels for free.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_flat import parts

Model = dict[str, Any]  # of one model's leaves by name
Models = dict[str, Model]  # by their places in a tree


def models_in(tree: Any, own: parts.Part | None = None) -> Models:
    """The distinct arrays of `tree`; those that `own` names stay where they are."""
    found: Models = {}
    seen: set[int] = set()
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        place, name = _place_and_name(path)
        if x.ndim and id(x) not in seen and not (own and own(name)):
            seen.add(id(x))
            found.setdefault(place, {})[name] = x
    return found


def replaced(tree: Any, before: Models, after: Models) -> Any:
    """`tree` with the arrays that are in `before` as they are in `after`, in all their places."""
    new = {id(x): after[place][name] for place, m in before.items() for name, x in m.items()}
    return jax.tree.map(lambda x: new.get(id(x), x), tree)


def shapes_of(f: Callable[..., Any], *arguments: Any) -> Any:
    """The shapes of f(*arguments), one object for arrays that are the same."""
    traced, shapes = jax.make_jaxpr(f, return_shape=True)(*arguments)
    leaves, structure = jax.tree.flatten(shapes)
    first: dict[int, Any] = {}
    same = [first.setdefault(id(v), x) for v, x in zip(traced.jaxpr.outvars, leaves, strict=True)]
    return jax.tree.unflatten(structure, same)


def _place_and_name(path: tuple[Any, ...]) -> tuple[str, str]:
    """A model begins at its `params` or `stats`, else at the first name of a dict."""
    words = [str(getattr(k, "name", getattr(k, "key", ""))) for k in path]
    starts = [i for i, word in enumerate(words) if word in ("params", "stats")]
    if starts:
        return parts.name_of(path[: starts[0]]), parts.name_of(path[starts[0] :])
    named = [i for i, k in enumerate(path) if isinstance(k, jax.tree_util.DictKey)]
    if named:
        return parts.name_of(path[: named[0]]), f"params/{parts.name_of(path[named[0] :])}"
    return parts.name_of(path), ""


def floating(model: Model) -> Model:
    """The arrays that codecs see: whole numbers travel as they are."""
    return {name: x for name, x in model.items() if jnp.issubdtype(x.dtype, jnp.floating)}


def is_parameter(name: str, x: Any) -> bool:
    """What is learned."""
    del x
    return name.startswith("params/")


def is_kernel(name: str, x: Any) -> bool:
    """Of what is learned, all but biases and the vectors of normalisation."""
    return is_parameter(name, x) and x.ndim > 1
