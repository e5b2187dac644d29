"""What methods cost by the formulas of Fani's thesis (tables 3.2 and 3.3, 4.2 and 4.3).

d features, C classes (C_k of client k), b parameters of the extractor, F its multiply-adds for one
example; dC the classifier's, of both. Floats of one client in one round; it is one time in all for
the closed forms:

                              down           up
    fed3r                     0              d (d + 1) / 2 + d C_k       `sync`: d C
    fedncm                    0              d C
    fedavg, fedavgm: all      b + dC         b + dC
             features, head   b, dC          b, dC
    scaffold                  twice those of fedavg
    fedsim, fedalt, pfedme: own head, features   b, dC, what is shared
    fp                        0              0

Multiply-adds of one example, for each time that a client visits it:

    fed3r                     F + d (d + 1) / 2 + d C_k                  `sync`: d C
    fedncm                    F
    fedavg, fedavgm, scaffold: all, features     3 (F + dC)
                               head              F + 3 dC
    fedsim                    3 (F + dC)
    fedalt                    the mean of its halves, head F + 3 dC and features 3 (F + dC)
    pfedme                    S 3 (F + dC), of S inner steps
    fp                        as fedavg, of the part that is trained
    with oll                  d C_k in the place of dC

With random features d is their number D, in what is sent and in what is added to F; the map itself,
D times what it reads, is left out as in the thesis. `printed` has the two numbers that the thesis
prints but does not use: 3 (F + 3 dC) for the head, and d C_k instead of D C_k. Of methods with own
parts the thesis counts the shared part's training alone (3 (F + dC) for features, F + 3 dC for the
head, as its tables have it), one of FedAlt's halves, and S = 2: `printed` too.

A run's metrics count what was really sent, biases and FedNCM's numbers of examples included, and
`flops` by these formulas, with the mean of C_k.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_flat import errors, parts
from fedjax_flat.data import Preprocess, class_counts
from fedjax_flat.experiment import usage
from fedjax_flat.experiment.assembly import Experiment
from fedjax_flat.models import Model, num_parameters
from fedjax_flat.ops.work import multiply_adds

PARTIAL = ("fedsim", "fedalt", "pfedme")
METHODS = dict.fromkeys(
    ("fed3r", "fed3r_rf", "fedncm", "fedavg", "fedavgm", "scaffold", *PARTIAL, "fp")
)
PARTS = dict.fromkeys(("all", "features", "head"))


class Sizes(NamedTuple):
    """What the formulas are of."""

    features: int
    classes: float  # a mean, of heads that are pruned
    extractor: int  # parameters
    forward: float  # multiply-adds of the extractor, per example
    random: int = 0

    @property
    def read(self) -> int:
        """How many features the classifier reads."""
        return self.random or self.features

    @property
    def head(self) -> float:
        """Parameters, and multiply-adds, of the classifier."""
        return self.read * self.classes


def sizes_of(preprocess: Preprocess, model: Model, random: int = 0) -> Sizes:
    """Counted from a model, and from the shapes of its inputs."""
    variables = jax.eval_shape(model.init, jax.random.key(0))
    head = parts.take(variables, parts.head)
    kernels = [x.shape for name, x in head.items() if name.endswith("kernel")]
    if len(kernels) != 1 or len(kernels[0]) != 2:
        raise errors.UsageError("costs are of networks with one dense layer named 'classifier'.")
    (d, classes), = kernels
    whole = multiply_adds(lambda v, x: model.apply(v, x).logits, variables, preprocess.inputs)
    extractor = num_parameters(variables.params) - sum(x.size for x in head.values())
    return Sizes(d, classes, extractor, whole - d * classes, random)


def of_experiment(built: Experiment) -> float | None:
    """Multiply-adds of one visit to one example under a config's method; None where no formula is.

    Of features that are cached, those of the network that made them count at every visit.
    """
    config = built.config
    base, added = usage.methods_of(config)
    part = _part(config, base.name)
    ascends = usage.sharpness_of(config) != "none"
    others = [m for m in added if m.name != "oll"]
    if base.name not in METHODS or others or part is None or ascends:
        return None
    try:
        sizes = sizes_of(*built.network, usage.random_features(config))
    except errors.UsageError:
        return None
    own = base.section == "fed3r" and not config.algorithm.fed3r.sync
    classes = _mean_classes(built, int(sizes.classes)) if own else None
    if usage.prunes(config) and built.classes is not None:
        sizes = sizes._replace(classes=float(built.classes.sum(axis=1).mean()))
    steps = config.algorithm.pfedme.steps if base.name == "pfedme" else 1
    return work(base.name, sizes, part=part, classes=classes, steps=steps)


def _part(config: Any, method: str) -> str | None:
    if method in PARTIAL:
        parted = not config.data.features and config.client.frozen == "none"
        known = {"head": "head", "features": "features", "none": "all"}
        return known.get(config.algorithm[method].own) if parted else None
    if config.data.features:
        return "head"
    if method == "fp" and config.client.frozen == "none":
        return config.algorithm.fp.part if config.algorithm.fp.part in PARTS else None
    return {"none": "all", "head": "features", "features": "head"}.get(config.client.frozen)


def _mean_classes(built: Experiment, classes: int) -> float:
    """The mean of C_k."""
    labels = np.asarray(built.data.examples.labels)
    return float((class_counts(built.partition, labels, classes) > 0).sum(axis=1).mean())


def floats(
    method: str, sizes: Sizes, *, part: str = "all", classes: float | None = None,
    sync: bool = False,
) -> tuple[float, float]:
    """(down, up) of one client in one round; `classes` are the client's own, C_k.

    `part` is what is trained; of methods with own parts, what stays with clients.
    """
    errors.lookup("method with a cost", method, METHODS)
    errors.lookup("part", part, PARTS)
    d, all_classes = sizes.read, sizes.classes
    if method == "fedncm":
        return 0, d * all_classes
    if method in ("fed3r", "fed3r_rf"):
        own = all_classes if sync or classes is None else classes
        return 0, d * (d + 1) // 2 + d * own
    if method == "fp":
        return 0, 0
    of = {"all": sizes.extractor + sizes.head, "features": sizes.extractor, "head": sizes.head}
    if method in PARTIAL:
        part = _shared(part)
    size = of[part] * (2 if method == "scaffold" else 1)
    return size, size


def _shared(own: str) -> str:
    """What travels where this part stays; `all` is of methods in which nothing does."""
    return {"head": "features", "features": "head", "all": "all"}[own]


def work(
    method: str, sizes: Sizes, *, part: str = "all", classes: float | None = None,
    printed: bool = False, steps: int = 2,
) -> float:
    """Multiply-adds of one visit to one example; `steps` are pFedMe's."""
    errors.lookup("method with a cost", method, METHODS)
    errors.lookup("part", part, PARTS)
    forward, head, d = sizes.forward, sizes.head, sizes.read
    if method == "fedncm":
        return forward
    if method in ("fed3r", "fed3r_rf"):
        own = sizes.classes if classes is None else classes
        return forward + d * (d + 1) / 2 + (sizes.features if printed else d) * own
    whole, of_head = 3 * (forward + head), forward + 3 * head
    if method in PARTIAL:
        if printed:
            return (2 if method == "pfedme" else 1) * (of_head if part == "features" else whole)
        return {"fedsim": whole, "fedalt": (whole + of_head) / 2, "pfedme": steps * whole}[method]
    if part == "head":
        return (3 if printed and method != "fp" else 1) * of_head
    return whole
