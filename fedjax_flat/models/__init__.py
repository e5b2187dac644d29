"""Networks as pairs of pure functions; no training logic here."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_flat import errors
from fedjax_flat.models.cnn import CNN
from fedjax_flat.models.mlp import MLP

MODELS = {"cnn": CNN, "mlp": MLP}


class Model(NamedTuple):
    """`init(key) -> params`; `apply(params, images, key=None) -> logits`.

    A key switches training mode on (dropout); without one the network is evaluated.
    """

    init: Callable[[jax.Array], Any]
    apply: Callable[..., jax.Array]


def from_linen(module: nn.Module, image_shape: tuple[int, ...]) -> Model:
    """Any flax module called as `module(images, train=...)`."""

    def init(key):
        return module.init(key, jnp.zeros((1, *image_shape), jnp.float32))["params"]

    def apply(params, images, key=None):
        if key is None:
            return module.apply({"params": params}, images, train=False)
        return module.apply({"params": params}, images, train=True, rngs={"dropout": key})

    return Model(init, apply)


def build(name: str, *, num_classes: int, image_shape: tuple[int, ...], **options) -> Model:
    """A registered network for this many classes and this shape of image."""
    module = errors.lookup("model", name, MODELS)(num_classes=num_classes, **options)
    model = from_linen(module, image_shape)
    try:
        jax.eval_shape(model.init, jax.random.key(0))
    except (TypeError, ValueError) as e:
        raise errors.UsageError(
            f"model {name!r} cannot read images of shape {tuple(image_shape)}: {e}"
        ) from e
    return model


def num_parameters(params: Any) -> int:
    """How many floats a model is."""
    return sum(x.size for x in jax.tree.leaves(params))


__all__ = ["CNN", "MLP", "MODELS", "Model", "build", "from_linen", "num_parameters"]
