"""The client optimiser: the papers' SGD, or any of optax by name. Its state is fresh every round.

Weight decay acts at w: it enters after whatever sharpness and drift made of the gradient and after
clipping, and before momentum and the learning rate, as in PyTorch's SGD.
"""

import ast
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_flat import errors

Schedule = Callable[[jax.Array], jax.Array]


def sgd(
    learning_rate: float | Schedule,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    clip: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """SGD; `clip` is the largest gradient norm, 0 for any; the rate may depend on the round."""
    errors.below_one("momentum", momentum)
    if nesterov and not momentum:
        raise errors.UsageError("nesterov = True needs a momentum; it is 0.")
    core = optax.trace(momentum, nesterov) if momentum else None
    return _chain(core, learning_rate, weight_decay, clip)


def named(
    name: str,
    learning_rate: float | Schedule,
    options: str = "",
    *,
    weight_decay: float = 0.0,
    clip: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Optimiser `name` of optax with `options`, e.g. `b1=0.9, nesterov=True`."""
    factory = _factory(name)
    given = _parsed(name, options, inspect.signature(factory).parameters)
    # Of rate 1, and downwards: the round's rate comes after.
    core = _in_any_type(optax.chain(factory(1.0, **given), optax.scale(-1.0)))
    return _chain(core, learning_rate, weight_decay, clip)


def _chain(core, learning_rate, weight_decay, clip) -> optax.GradientTransformationExtraArgs:
    rate = 0 if callable(learning_rate) else learning_rate
    for name, value in (("learning rate", rate), ("weight_decay", weight_decay), ("clip", clip)):
        if isinstance(value, int | float):  # not one that is traced
            errors.at_least(name, value, 0)
    parts: list[optax.GradientTransformation] = []
    if clip:
        parts.append(optax.clip_by_global_norm(clip))
    if weight_decay:
        parts.append(optax.add_decayed_weights(weight_decay))
    if core is not None:
        parts.append(core)
    return optax.chain(*parts, scale_by_round(learning_rate))


def _factory(name: str) -> Callable[..., optax.GradientTransformation]:
    takes_rate = lambda f: inspect.isfunction(f) and next(
        iter(inspect.signature(f).parameters), ""
    ) == "learning_rate"
    # They need the loss's value, or are no optimisers.
    not_here = ("lbfgs", "polyak_sgd", "scale_by_learning_rate")
    names = {n: f for n, f in vars(optax).items()
             if not n.startswith("_") and n not in not_here and takes_rate(f)}
    return errors.lookup("client optimizer", name, names)


def _parsed(name: str, options: str, parameters) -> dict[str, Any]:
    known = [p for p in parameters if p != "learning_rate"]
    found = {}
    for word in filter(None, (w.strip() for w in options.split(","))):
        option, _, text = (part.strip() for part in word.partition("="))
        if option not in known:
            raise errors.UsageError(
                f"optimiser {name} has no option {option!r} (client.options = {options!r}): "
                f"expected {', '.join(known)}." + errors.did_you_mean(option, known)
            )
        try:
            found[option] = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            raise errors.UsageError(
                f"client.options: {word!r}: expected NAME=NUMBER, e.g. b1=0.9."
            ) from None
    return found


def _in_any_type(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """optax counts steps in integers, which strict promotion would not let it use."""
    whole = optax.with_extra_args_support(optimizer)

    def update(updates, state, params=None, **extra):
        with jax.numpy_dtype_promotion("standard"):
            return whole.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def rate_of(learning_rate: float | Schedule, round: Any) -> Any:
    """The rate of a round."""
    return learning_rate(round) if callable(learning_rate) else learning_rate


def scale_by_round(learning_rate: float | Schedule) -> optax.GradientTransformationExtraArgs:
    """Multiplies by -learning_rate, or by -learning_rate(round) with the extra argument `round`."""

    def update(updates, state, params=None, *, round=0, **extra):
        del params, extra
        rate = rate_of(learning_rate, round)
        return jax.tree.map(lambda u: -jnp.asarray(rate, u.dtype) * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
