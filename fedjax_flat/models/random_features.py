"""A network whose classifier reads random features of what it read before.

Rahimi and Recht, "Random features for large-scale kernel machines" (NeurIPS 2007); Fed3R-RF of
Fani's thesis (equation 3.21). phi are the network's d features, D the number of random ones:

    z = sqrt(2 / D) cos(omega^T phi + beta),    omega (d, D),    beta ~ U(0, 2 pi)

z . z' tends to a Gaussian kernel of phi - phi' = r as D grows. Which one, `law` says:

    printed   omega ~ N(0, 2 / sigma)     exp(-||r||^2 / sigma)        the thesis's law of omega
    kernel    omega ~ N(0, 1 / sigma^2)   exp(-||r||^2 / (2 sigma^2))  the thesis's kernel

The two do not agree in the thesis (equations 3.20 and 3.21); its sigma = 1000 goes with the first.
omega and beta are drawn with the model's other weights, are the same for all clients, and are never
trained: they are statistics, in the collection `random_features`.
"""

import math

import jax
import jax.numpy as jnp

from fedjax_flat import errors, rng
from fedjax_flat.models.base import CLASSIFIER, Model, Outputs, Variables
from fedjax_flat.models.layers import uniform

COLLECTION = "random_features"
DEVIATION = {"printed": lambda sigma: math.sqrt(2 / sigma), "kernel": lambda sigma: 1 / sigma}
LAWS = tuple(DEVIATION)


def with_random_features(
    model: Model, count: int, *, sigma: float = 1000.0, law: str = "printed"
) -> Model:
    """`model` with a classifier of `count` random features; its own classifier is left out."""
    errors.at_least("random features", count, 1)
    errors.positive("sigma", sigma)
    deviation = errors.lookup("law of random features", law, DEVIATION)(sigma)
    own = jax.eval_shape(model.init, jax.random.key(0)).params.get(CLASSIFIER)
    if own is None:
        raise errors.UsageError(
            f"random features: expected a model whose last module is named {CLASSIFIER!r}, so that "
            "what it reads is known."
        )
    width, classes = own["kernel"].shape

    def init(key):
        variables = model.init(key)
        omega = deviation * jax.random.normal(rng.fold(key, "omega"), (width, count), jnp.float32)
        beta = jax.random.uniform(
            rng.fold(key, "beta"), (count,), jnp.float32, 0, 2 * math.pi
        )
        draw = uniform(count)
        head = {"kernel": draw(rng.fold(key, "kernel"), (count, classes)),
                "bias": draw(rng.fold(key, "bias"), (classes,))}
        return Variables(
            {**variables.params, CLASSIFIER: head},
            {**(variables.stats or {}), COLLECTION: {"omega": omega, "beta": beta}},
        )

    def apply(variables, inputs, key=None, mask=None, at_blocks=None):
        random = variables.stats[COLLECTION]
        inner = {name: x for name, x in variables.stats.items() if name != COLLECTION}
        nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), own)
        network = Variables({**variables.params, CLASSIFIER: nothing}, inner or ())
        outputs = model.apply(network, inputs, key, mask, at_blocks)
        phi = outputs.features.astype(jnp.float32)
        z = math.sqrt(2 / count) * jnp.cos(_product(phi, random["omega"]) + random["beta"][None])
        head = variables.params[CLASSIFIER]
        logits = _product(z, head["kernel"]) + head["bias"][None]
        stats = {**(outputs.stats or {}), COLLECTION: random}
        return Outputs(logits, z, stats, outputs.blocks)

    return Model(init, apply)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
