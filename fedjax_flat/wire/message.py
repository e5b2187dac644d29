"""A codec acting on all models of what is sent."""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_flat import errors, parts, rng
from fedjax_flat.wire.codec import Codec, bits_sent
from fedjax_flat.wire.names import floating, models_in, replaced
from fedjax_flat.wire.packet import bits_of


def started(codec: Codec | None, tree: Any, own: parts.Part | None) -> Any:
    """The codec's states for the models of a tree, by place; () if it keeps nothing."""
    if codec is None:
        return ()
    models = {place: floating(model) for place, model in models_in(tree, own).items()}
    states = {place: codec.init(model) for place, model in models.items() if model}
    return states if jax.tree.leaves(states) else ()


def through(
    codec: Codec, tree: Any, own: parts.Part | None, states: Any, key: jax.Array
) -> tuple[Any, Any, jax.Array]:
    """(`tree` after encoding and decoding, the codec's states, the bits if the codec weighs them).

    What is not a number with a fraction, and what is `own`, stays as it is.
    """
    models = models_in(tree, own)
    decoded, kept, bits = {}, dict[str, Any](), jnp.int32(0)
    for n, (place, model) in enumerate(models.items()):
        numbers = floating(model)
        decoded[place] = model
        if not numbers:
            continue
        if states and place not in states:
            raise errors.UsageError(
                f"what a codec keeps between rounds is shaped like the model, but {place} is sent "
                f"too, {', '.join(numbers)}. Give compressed(..., data=) one client's data, of "
                "which shapes are taken."
            )
        packet, kept[place] = codec.encode(
            numbers, states[place] if states else (), rng.fold(key, n)
        )
        decoded[place] = {**model, **codec.decode(packet)}
        if codec.weigh:
            rest = {name: x for name, x in model.items() if name not in numbers}
            bits = bits + codec.weigh(packet) + bits_of(rest)
    return replaced(tree, models, decoded), kept if jax.tree.leaves(kept) else (), bits


def bits_in(codec: Codec | None, tree: Any, own: parts.Part | None) -> int:
    """What the models of a tree weigh, from shapes."""
    weigh = codec and codec.bits
    return sum(bits_sent(weigh, model) for model in models_in(tree, own).values())
