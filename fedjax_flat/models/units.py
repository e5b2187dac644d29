"""Units of a network: which axes of which leaves belong to which hidden layer, and parts of them.

A unit is a channel of a convolution or a value of a dense layer. A module with a field `hidden`,
the widths of its hidden layers, can be built narrower, and what an axis belongs to is read from
shapes alone: one layer is made twice as wide, and the axes that double are its. Where maps are
flattened, an axis has height x width entries per unit: (position, channel), the channel fastest.

    extract   the leaves of the narrower network that has the units `kept` of the wide one
    remap     leaves of the narrower network at their places in the wide one, 0 elsewhere

Both take any tree whose arrays are the model's leaves by name, (model, momentum) or a gradient say;
numbers that are less than an array stay as they are. Inputs and outputs have no units to choose.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat import errors, parts

Kept = Sequence[jax.Array]  # ascending indices of units, one array per hidden layer


class Axis(NamedTuple):
    """Axis `place` of a leaf has `copies` entries for each unit of hidden layer `layer`."""

    place: int
    layer: int
    copies: int


class Leaf(NamedTuple):
    """A leaf of the wide network."""

    shape: tuple[int, ...]
    axes: tuple[Axis, ...]


class Units(NamedTuple):
    """Of a network: the widths of its hidden layers, and its leaves by name, `Conv_0/kernel`."""

    hidden: tuple[int, ...]
    leaves: dict[str, Leaf]


def units_of(shapes_of: Callable[[tuple[int, ...]], Any], hidden: tuple[int, ...]) -> Units | None:
    """The units of the network that `shapes_of(hidden)` describes; None if they form no chain."""
    shapes = lambda widths: {
        name.partition("/")[2]: leaf.shape
        for name, leaf in parts.take(shapes_of(widths), lambda name: True).items()
    }
    plain = shapes(hidden)
    wider = [shapes((*hidden[:i], 2 * n, *hidden[i + 1 :])) for i, n in enumerate(hidden)]
    leaves = {}
    for name, shape in plain.items():
        grown = [
            Axis(place, layer, size // hidden[layer])
            for place, size in enumerate(shape)
            for layer, other in enumerate(wider)
            if other[name][place] != size
        ]
        if any(wider[a.layer][name][a.place] != 2 * shape[a.place] for a in grown):
            return None  # an axis of other units too
        leaves[name] = Leaf(shape, tuple(grown))
    found = {axis.layer for leaf in leaves.values() for axis in leaf.axes}
    return Units(hidden, leaves) if hidden and len(found) == len(hidden) else None


def widths_of(units: Units, tree: Any) -> tuple[int, ...]:
    """The widths of the hidden layers that a tree of leaves has."""
    found = list(units.hidden)
    for name, x in parts.take(tree, lambda name: True).items():
        leaf = _leaf(units, name)
        for axis in leaf.axes if leaf else ():
            found[axis.layer] = x.shape[axis.place] // axis.copies
    return tuple(found)


def extract(units: Units, tree: Any, kept: Kept) -> Any:
    """What the narrower network has of `tree`."""

    def one(name, x, leaf):
        _check(name, x, leaf.shape)
        for axis in leaf.axes:
            x = jnp.take(x, _rows(kept[axis.layer], axis, units), axis.place, mode="clip")
        return x

    return _each(units, tree, one)


def remap(units: Units, tree: Any, kept: Kept) -> Any:
    """What the narrower network has at its places in the wide one, and 0 elsewhere."""
    widths = [k.shape[0] for k in kept]
    # where a unit of the wide network stands in the narrow one
    place = [jnp.zeros(n, jnp.int32).at[k].set(jnp.arange(k.shape[0], dtype=jnp.int32))
             for n, k in zip(units.hidden, kept, strict=True)]
    there = masks(units, kept)

    def one(name, x, leaf):
        _check(name, x, _narrow(leaf, widths))
        for axis in leaf.axes:
            rows = _spread(place[axis.layer], axis, widths[axis.layer])
            shape = [1] * x.ndim
            shape[axis.place] = -1
            has = jnp.tile(there[axis.layer], axis.copies).reshape(shape)
            x = jnp.take(x, rows, axis.place, mode="clip")
            x = jnp.where(jnp.broadcast_to(has, x.shape), x, jnp.zeros_like(x))
        return x

    return _each(units, tree, one)


def masks(units: Units, kept: Kept) -> tuple[jax.Array, ...]:
    """Per hidden layer, which of its units are kept."""
    pairs = zip(units.hidden, kept, strict=True)
    return tuple(jnp.zeros(n, bool).at[k].set(True) for n, k in pairs)


def coverage(units: Units, tree: Any, kept: Sequence[jax.Array], weights: jax.Array) -> Any:
    """Per entry of `tree`, the weights of those that have it, summed; `kept`: masks, stacked."""

    def one(name, x, leaf):
        _check(name, x, leaf.shape)
        # "kb,ka,k->ba": sum over k of the weight and, for every axis, of whether k has the unit.
        letters = "abcdefgh"[: len(leaf.axes)]
        terms = [kept[axis.layer].astype(x.dtype) for axis in leaf.axes]
        pattern = ",".join([*(f"k{i}" for i in letters), "k"]) + f"->{letters}"
        share = jnp.einsum(pattern, *terms, weights.astype(x.dtype))
        for i, axis in enumerate(leaf.axes):
            share = jnp.concatenate([share] * axis.copies, axis=i)
        shape = [n if p in {a.place for a in leaf.axes} else 1 for p, n in enumerate(leaf.shape)]
        return jnp.broadcast_to(share.reshape(shape), leaf.shape)

    return _each(units, tree, one)


def narrowed(units: Units, shapes: dict[str, Any], widths: Sequence[int]) -> dict[str, Any]:
    """The shapes, by name, of what is the model's in the network of these widths; nothing else."""
    found = {}
    for name, x in shapes.items():
        leaf = _leaf(units, name)
        if leaf:
            found[name] = jax.ShapeDtypeStruct(_narrow(leaf, widths), x.dtype)
    return found


def check(units: Units, tree: Any) -> None:
    """Refuses a tree with arrays that are not the wide network's leaves."""
    _each(units, tree, lambda name, x, leaf: _check(name, x, leaf.shape))


def _leaf(units: Units, name: str) -> Leaf | None:
    """The leaf that something in a tree is, `0/params/Conv_0/kernel`: the longest name at its end.
    """
    fits = [n for n in units.leaves if name == n or name.endswith(f"/{n}")]
    return units.leaves[max(fits, key=len)] if fits else None


def _each(units: Units, tree: Any, one: Callable[[str, Any, Leaf], Any]) -> Any:
    def of(path, x):
        name = parts.name_of(path)
        leaf = _leaf(units, name)
        if leaf is not None:
            return one(name, x, leaf)
        if jnp.ndim(x):
            raise errors.UsageError(
                f"{name} of shape {jnp.shape(x)} is no part of the model, so nobody can say which "
                "of it belongs to the units of a sub-model: expected messages and uploads of "
                f"arrays with the model's names, {', '.join(list(units.leaves)[:3])}, ..."
            )
        return x

    return jax.tree_util.tree_map_with_path(of, tree)


def _check(name: str, x: Any, shape: tuple[int, ...]) -> None:
    if x.shape != shape:
        raise errors.UsageError(
            f"{name} has shape {x.shape}, expected the model's {shape}: a sub-model of it cannot "
            "be taken."
        )


def _narrow(leaf: Leaf, widths: Sequence[int]) -> tuple[int, ...]:
    shape = list(leaf.shape)
    for axis in leaf.axes:
        shape[axis.place] = axis.copies * widths[axis.layer]
    return tuple(shape)


def _rows(kept: jax.Array, axis: Axis, units: Units) -> jax.Array:
    return _spread(kept, axis, units.hidden[axis.layer])


def _spread(indices: jax.Array, axis: Axis, width: int) -> jax.Array:
    """Indices of units of a layer of this width, at every position: channels are the fastest."""
    positions = width * jnp.arange(axis.copies, dtype=jnp.int32)
    return (positions[:, None] + indices[None].astype(jnp.int32)).reshape(-1)
