"""A network whose classifier has a part for every domain, of which a graph makes one another's.

Of FedCG (algorithms/fedcg.py). h is what the classifier f_a reads, C its outputs, D the number of
domains. Row d of V (D, q), q = width C + C, is a kernel, row by row, and a bias, of f_{s,d}:

    V^ = ReLU(A V W)                            (5.13)   the parameters that are used
    z  = f_a(h) + lambda sum_d w_d f_{s,d}(h)   (5.12)   lambda is learned

W is q x q (`mixing` = full), two matrices with `rank` columns and rows, V^ = ReLU(ReLU(A V W) E),
or none; without `relu` the outer one is left out. A (D, D) and the teacher are no business of any
optimiser, so they are statistics, of the collection `domains`.

w is of classifiers of domains that read what the network reads: while it is trained one-hot, at the
teacher's most probable domain, else the probabilities of the student (`soft`, `by`). In training
mode the logits of both are the last of `Outputs.auxiliary`, so that a term can teach the student.

The network's own leaves keep their names. V, W and lambda are under `domains/classifier`, so that
they are parts of the head; the student is `domains/student`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat import errors, rng
from fedjax_flat.models.base import CLASSIFIER, Model, Outputs, Variables
from fedjax_flat.models.layers import uniform

COLLECTION = "domains"
MIXINGS = ("bottleneck", "full", "none")
STARTS = ("identity", "uniform")
EXPERTS = ("student", "teacher")


class Form(NamedTuple):
    """What is chosen of the classifier's parts."""

    mixing: str = "bottleneck"
    rank: int = 64
    relu: bool = True
    scale: float = 1.0  # lambda, where it starts
    start: str = "identity"  # A, before the first average
    soft: bool = True
    by: str = "student"


class Experts(NamedTuple):
    """Logits of domains."""

    student: jax.Array
    teacher: jax.Array


def with_domains(model: Model, expert: Model, form: Form) -> Model:
    """`model`, with a part of its classifier for each of the outputs of `expert`."""
    errors.lookup("mixing", form.mixing, dict.fromkeys(MIXINGS))
    errors.lookup("start", form.start, dict.fromkeys(STARTS))
    errors.lookup("by", form.by, dict.fromkeys(EXPERTS))
    errors.at_least("rank", form.rank, 1)
    width, classes = _widths(model)
    count = shapes(expert).logits.shape[-1]
    size = width * classes + classes

    def init(key):
        variables = model.init(key)
        fold = lambda *names: rng.fold(key, COLLECTION, *names)
        own = {
            "domains": uniform(width)(fold("parts"), (count, size)),
            "scale": jnp.full(1, form.scale, jnp.float32),
        }
        inner = form.rank if form.mixing == "bottleneck" else size
        draw = jax.nn.initializers.lecun_normal()
        if form.mixing != "none":
            own["mix"] = draw(fold("mix"), (size, inner), jnp.float32)
        if form.mixing == "bottleneck":
            own["expand"] = draw(fold("expand"), (inner, size), jnp.float32)
        student, teacher = (expert.init(fold(name)).params for name in EXPERTS)
        graph = jnp.eye(count) if form.start == "identity" else jnp.full((count, count), 1 / count)
        return Variables(
            {**variables.params, COLLECTION: {CLASSIFIER: own, "student": student}},
            {**(variables.stats or {}), COLLECTION: {"graph": graph, "teacher": teacher}},
        )

    def apply(variables, inputs, key=None, mask=None, at_blocks=None):
        params, stats = variables.params[COLLECTION], variables.stats[COLLECTION]
        outputs = model.apply(plain(variables), inputs, key, mask, at_blocks)
        of = {"student": params["student"], "teacher": stats["teacher"]}
        logits = {
            name: expert.apply(Variables(of[name]), inputs, None, mask).logits
            for name in (EXPERTS if key is not None else (form.by,))
        }
        if key is not None:
            weights = hard(logits["teacher"])
        else:
            weights = (jax.nn.softmax if form.soft else hard)(logits[form.by])
        own = params[CLASSIFIER]
        used = convolve(own, stats["graph"], relu=form.relu)
        h = outputs.features.astype(jnp.float32)
        experts = (Experts(**logits),) if key is not None else ()
        return outputs._replace(
            logits=outputs.logits + own["scale"][0] * specific(h, used, weights, classes),
            stats={**dict(outputs.stats or {}), COLLECTION: stats},
            auxiliary=(*outputs.auxiliary, *experts),
        )

    return Model(init, apply, model.inputs)


def convolve(own: dict[str, jax.Array], graph: jax.Array, *, relu: bool = True) -> jax.Array:
    """V^ = ReLU(A V W), (5.13)."""
    used = graph @ own["domains"]
    if "mix" in own:
        used = used @ own["mix"]
    if "expand" in own:
        used = jax.nn.relu(used) @ own["expand"]
    return jax.nn.relu(used) if relu else used


def specific(h: jax.Array, used: jax.Array, weights: jax.Array, classes: int) -> jax.Array:
    """sum_d w_d f_{s,d}(h) of (5.12)."""
    count, width = used.shape[0], h.shape[-1]
    kernels = used[:, : width * classes].reshape(count, width, classes)
    each = jnp.einsum("np,dpc->ndc", h, kernels) + used[None, :, width * classes :]
    return jnp.sum(weights[:, :, None] * each, axis=1)


def similarity(parts: jax.Array, beta: float) -> jax.Array:
    """A of (5.14): beta, and 1 - beta in shares of 1 / ||v_i - v_j||. One domain alone has 1.

    Of domains that are equal to i, if there are some, each has the same share, and others none,
    which is the limit.
    """
    count = parts.shape[0]
    if count == 1:
        return jnp.ones((1, 1))
    others = ~jnp.eye(count, dtype=bool)
    squares = jnp.sum(jnp.square(parts[:, None] - parts[None]), axis=-1)
    equal = others & (squares == 0)
    near = jnp.where(others & ~equal, jax.lax.rsqrt(jnp.where(squares > 0, squares, 1.0)), 0.0)
    h = jnp.where(jnp.any(equal, axis=1, keepdims=True), equal.astype(jnp.float32), near)
    shares = h / jnp.sum(h, axis=1, keepdims=True)
    return jnp.where(others, (1 - beta) * shares, beta)


def hard(logits: jax.Array) -> jax.Array:
    """One-hot, at the most probable domain; the first of several."""
    return jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1])


def plain(variables: Variables) -> Variables:
    """The model without what is of domains."""
    rest = lambda tree: {n: x for n, x in dict(tree or {}).items() if n != COLLECTION}
    return Variables(rest(variables.params), rest(variables.stats) or ())


def shapes(model: Model) -> Outputs:
    """Of what a network says of one example."""

    def one(key):
        inputs = jax.tree.map(lambda s: jnp.zeros((1, *s.shape[1:]), s.dtype), model.inputs)
        return model.apply(model.init(key), inputs)

    return jax.eval_shape(one, jax.random.key(0))


def _widths(model: Model) -> tuple[int, int]:
    """(what the classifier reads, classes)."""
    found = shapes(model)
    shape_of: Callable[[Any], tuple[int, ...]] = lambda x: getattr(x, "shape", ())
    read, said = shape_of(found.features), shape_of(found.logits)
    if len(read) != 2 or len(said) != 2:
        raise errors.UsageError(
            f"domains of a network whose classifier makes {said} of {read}: expected a last module "
            f"named {CLASSIFIER!r} that makes (batch, classes) of (batch, width), for one label "
            "per example."
        )
    return read[1], said[1]
