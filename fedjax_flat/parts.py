"""Parts of a model by the names of its leaves: what is frozen, what stays with a client.

A leaf is named by its path, `params/Conv_0/kernel` or `stats/batch_stats/BatchNorm_0/mean`; a part
is a predicate on such names, and its values are a flat dict from name to leaf.
"""

import fnmatch
from collections.abc import Callable
from typing import Any

import jax

from fedjax_flat import errors

Part = Callable[[str], bool]


def name_of(path) -> str:
    """`params/Conv_0/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def take(tree: Any, part: Part) -> dict[str, Any]:
    """The leaves of a part."""
    named = jax.tree_util.tree_leaves_with_path(tree)
    return {name: leaf for path, leaf in named if part(name := name_of(path))}


def put(tree: Any, values: dict[str, Any]) -> Any:
    """`tree` with these leaves in their places."""
    if not values:
        return tree
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: values.get(name_of(path), leaf), tree
    )


def without(tree: Any, part: Part | None) -> Any:
    """`tree` with zeros in the place of a part."""
    if part is None:
        return tree
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.numpy.zeros_like(leaf) if part(name_of(path)) else leaf, tree
    )


def head(name: str) -> bool:
    """The classifier: the module that reads the features, which models name `classifier`."""
    return "classifier" in name.split("/")[:-1]


def named(text: str) -> Part | None:
    """The part that a setting names: none, all, head, features (all but the head), or by patterns.

    Patterns of leaves' names are separated by commas: `params/stem/*,params/b0*`.
    """
    if "/" not in text and "*" not in text:
        known = {
            "none": None, "all": lambda name: True, "head": head,
            "features": lambda name: not head(name),
        }
        return errors.lookup("part of a model", text, known)
    patterns = text.split(",")
    return lambda name: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def either(a: Part | None, b: Part | None) -> Part | None:
    """What is in one of them; None is nothing."""
    if a is None or b is None:
        return a or b
    return lambda name: a(name) or b(name)


def statistics(name: str) -> bool:
    """What is measured, not learned."""
    return name.startswith("stats/") or "/stats/" in name


def normalisation(name: str) -> bool:
    """Parameters and statistics of normalisation layers: modules with Norm in their name."""
    return any("norm" in module.lower() for module in name.split("/")[:-1])
