"""Networks as pairs of pure functions; no training logic here."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_flat import errors
from fedjax_flat.models.cnn import CNN
from fedjax_flat.models.mlp import MLP
from fedjax_flat.models.resnet import ResNet18

MODELS = {"cnn": CNN, "mlp": MLP, "resnet18": ResNet18}


class Model(NamedTuple):
    """`init(key) -> params`; `apply(params, images, key=None) -> logits`.

    A key switches training mode on (dropout); without one the network is evaluated.
    """

    init: Callable[[jax.Array], Any]
    apply: Callable[..., jax.Array]


PRECISIONS = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def from_linen(
    module: nn.Module, image_shape: tuple[int, ...], precision: str = "float32"
) -> Model:
    """Any flax module called as `module(images, train=...)`.

    With precision `bfloat16` the images, and so the layers of `models.layers`, are bfloat16; sums,
    parameters, gradients, logits and loss are float32.
    """
    dtype = errors.lookup("precision", precision, PRECISIONS)

    def init(key):
        return module.init(key, jnp.zeros((1, *image_shape), jnp.float32))["params"]

    def apply(params, images, key=None):
        if dtype == jnp.bfloat16:
            images = images.astype(dtype)
        train, rngs = key is not None, None if key is None else {"dropout": key}
        logits: Any = module.apply({"params": params}, images, train=train, rngs=rngs)
        return logits.astype(jnp.float32) if dtype == jnp.bfloat16 else logits

    return Model(init, apply)


def build(
    name: str,
    *,
    num_classes: int,
    image_shape: tuple[int, ...],
    precision: str = "float32",
    **options,
) -> Model:
    """A registered network for this many classes and this shape of image."""
    module = errors.lookup("model", name, MODELS)(num_classes=num_classes, **options)
    model = from_linen(module, image_shape, precision)
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


__all__ = ["CNN", "MLP", "MODELS", "Model", "ResNet18", "build", "from_linen", "num_parameters"]
