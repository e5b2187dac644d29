"""What an experiment is: every setting, its default and its range, and whether it has an effect.

A config is a locked `ml_collections.ConfigDict`: an unknown name fails at once and names the
nearest valid one. Files in `configs/` start from `default_config()` and change what they need.

The settings here are those of every experiment. Those of a method, a model, a partition or a task
live in its own file; `default_config()` has them all, `used` tells which of them matter to the
choices of a config. One that was changed and has no effect is refused (`validate`), unless a config
file that sets one for many cells of a table drops it (`only_used`).
"""

import json
from collections.abc import Mapping
from typing import Any

import ml_collections
from ml_collections import config_dict

from fedjax_flat import errors
from fedjax_flat.algorithms import METHODS
from fedjax_flat.algorithms.base import WEIGHTINGS
from fedjax_flat.algorithms.private import BOUNDS
from fedjax_flat.algorithms.robust import AGGREGATES, FEATURES, SHARES
from fedjax_flat.algorithms.submodels import ASSIGNMENTS, CHOICES
from fedjax_flat.data import PARTITIONS, SHIFTS, SOURCES, STYLES
from fedjax_flat.engine.selection import SELECTIONS
from fedjax_flat.experiment import usage
from fedjax_flat.groups import GROUPINGS, METRICS, NAMES
from fedjax_flat.groups.estimators import READINGS
from fedjax_flat.models import LAWS, MODELS, STATISTICS
from fedjax_flat.models.base import PRECISIONS
from fedjax_flat.registry import Registry
from fedjax_flat.server import ADAPTIVE
from fedjax_flat.settings import Setting
from fedjax_flat.tasks import TASKS
from fedjax_flat.wire import CODECS

# May differ between two runs of one run folder: they change how long and how closely we look at
# training, never a bit of it.
FREE = (
    "rounds", "rounds_per_dispatch", "eval", "curvature", "checkpoint", "metrics.to", "debug",
    "data.placement",
)

_SHARE: dict[str, Any] = {"at_least": 0, "below": 1}
SETTINGS: dict[str, Setting] = {
    "seed": Setting(0, at_least=0, below=2**32),
    "rounds": Setting(100, at_least=1),
    "rounds_per_dispatch": Setting(
        50, "at most; fewer when rounds are long", at_least=1, at_most=10**6
    ),
    "debug": Setting(False, "without jit, naming client, step and tensor of the first NaN"),
    "imports": Setting((), "files that register what this config names; see --import"),
    "phases": Setting(
        (), "experiments one after the other: a name and the settings that are its own, for each",
        items=dict,
    ),

    "data.name": Setting("digits"),
    "data.placement": Setting(
        "auto", "where examples are: host keeps them off the device; auto is device if they fit",
        choices=("auto", "device", "host"),
    ),
    "data.mean": Setting(
        (), "of the channels, by which inputs are normalised; () is the source's", items=float
    ),
    "data.std": Setting((), "their deviations; () is the source's", items=float),
    "data.features": Setting(
        False, "examples become their features by the network as it starts, computed once and kept "
        "on disk; its classifier alone is the model"
    ),
    "data.crop_padding": Setting(0, "pixels around an image of which a crop is taken", at_least=0),
    "data.resized_crop": Setting(
        0, "side to which a random part of an image is resized; 0 is none", at_least=0
    ),
    "data.rotation": Setting(
        0.0, "largest random turn to either side, of 1; 0 is none", at_least=0, at_most=0.5
    ),
    "data.flip": Setting(False, "left to right, half of the time"),
    "data.scale": Setting(
        (), "range of a random scale of images and labels of pixels; () is none", items=float
    ),
    "data.crop": Setting(
        (), "height and width of a random crop of both; () is the whole image", items=int
    ),
    "data.jitter": Setting(
        (), "largest changes of brightness, contrast and saturation; () is none", items=float
    ),
    "data.cutout": Setting(0, "side of the square in pixels; 0 is none", at_least=0),
    "data.mixup": Setting(0.0, "alpha of Beta(alpha, alpha); 0 is none", at_least=0),
    "data.validation": Setting(0.0, "share of the train examples held out", **_SHARE),
    "data.validation_from": Setting(
        "clients", "each client's share, or of all", choices=("clients", "server")
    ),
    "data.unlabelled": Setting(
        0.0, "share of the train examples that the server has instead, without labels", **_SHARE
    ),
    "data.labelled": Setting(
        "none", "natural client (drive, city) whose train examples are the server's; split target: "
        "the tests of all others. Or a share of the train examples, 0.1"
    ),
    "data.trains": Setting(
        "clients", "or the server, by itself, on its labelled examples",
        choices=("clients", "server"),
    ),
    "data.imbalance": Setting(
        "none", "classes made uneven, half of all examples left: Fed3R's variants",
        choices=("none", "A", "B", "C", "D"),
    ),
    "data.local_test": Setting(
        0.0, "share of each client's train examples that are its own test examples", **_SHARE
    ),
    "data.closed": Setting(
        False, "local test examples are of classes that the client trains on: where all of a class "
        "would be tests, one is not"
    ),
    "data.rdn": Setting(
        False, "train images are normalised as a client at random has them, others as their own"
    ),
    "data.rdn_groups": Setting(
        0, "statistics of so many groups of clients, by number; 0: of each client", at_least=0
    ),
    "data.shift.name": Setting("none", "clients that see the world differently"),
    "data.style.name": Setting("none", "train images in the style of other clients'"),
    "task.name": Setting("auto", "what is learned; auto is what the data are for"),
    "partition.name": Setting("dirichlet"),
    "partition.virtual": Setting(
        0, "FedVC: examples of a virtual client; large clients are cut, small ones repeated",
        at_least=0,
    ),
    "model.name": Setting("mlp"),
    "model.precision": Setting(
        "float32", "bfloat16: sums, parameters and loss stay float32", choices=tuple(PRECISIONS)
    ),
    "model.statistics": Setting(
        "averaged", "BatchNorm's, over clients; or each client's own (SiloBN), and all of its "
        "layers (FedBN); or never moved",
        choices=STATISTICS,
    ),
    "model.fix_after": Setting(
        0, "rounds after which statistics move no more and normalise (FixBN); 0 is never",
        at_least=0,
    ),
    "model.random.features": Setting(
        0, "random ones, of its own, that the classifier reads; 0 is none", at_least=0
    ),
    "model.random.sigma": Setting(1000.0, "of their Gaussian kernel", above=0),
    "model.random.law": Setting("printed", "how sigma is meant", choices=LAWS),
    "algorithm.name": Setting(
        "fedavg", "or some that go together, feddyn+fedmlb; +swa, +wima: an averaged model too"
    ),
    "algorithm.weighting": Setting("examples", "of clients in the mean", choices=WEIGHTINGS),

    "client.optimizer": Setting("sgd", "or any of optax"),
    "client.options": Setting("", "of an optimiser of optax: b1=0.9, eps=1e-6"),
    "client.learning_rate": Setting(0.1, at_least=0),
    "client.learning_rate_decay": Setting(1.0, "the round's rate: rate * decay^round", at_least=0),
    "client.momentum": Setting(0.0, **_SHARE),
    "client.nesterov": Setting(False),
    "client.weight_decay": Setting(0.0, at_least=0),
    "client.clip": Setting(0.0, "largest norm of the gradient; 0 is any", at_least=0),
    "client.batch_size": Setting(16, at_least=1),
    "client.drop_last": Setting(False, "a last batch that is not full, unless it is the only one"),
    "client.epochs": Setting(1, at_least=1),
    "client.steps": Setting(0, "when positive, local steps instead of epochs", at_least=0),
    "client.frozen": Setting(
        "none", "what is not trained, nor sent: head, features (and their statistics), or patterns "
        "of leaves' names, params/stem/*"
    ),
    "client.sharpness": Setting("none", choices=("none", "sam", "asam")),
    "client.rho": Setting(0.1, "radius of the ascent", at_least=0),
    "client.rho_start": Setting(0.001, "where a warm-up of rho begins", at_least=0),
    "client.rho_warmup": Setting(0, "its length in rounds; 0 is a constant rho", at_least=0),
    "client.eta": Setting(0.2, "asam: added to |w|", at_least=0),
    "client.asam_scale": Setting("kernels", "or biases too", choices=("kernels", "all")),

    "server.optimizer": Setting("sgd", choices=("sgd", *ADAPTIVE)),
    "server.learning_rate": Setting(1.0, "of sgd", at_least=0),
    "server.momentum": Setting(0.0, "of sgd", **_SHARE),
    "server.adaptive.learning_rate": Setting(0.01, "of adam, adagrad, yogi", at_least=0),
    "server.adaptive.beta1": Setting(0.9, **_SHARE),
    "server.adaptive.beta2": Setting(0.99, **_SHARE),
    "server.adaptive.tau": Setting(1e-3, above=0),
    "server.adaptive.epsilon": Setting(
        "outside", "tau beside the root or under it", choices=("outside", "inside")
    ),
    "server.adaptive.initial": Setting(
        "tau", "v before the first round: tau^2 or 0", choices=("tau", "zero")
    ),
    "server.adaptive.bias_correction": Setting(False),
    "server.average": Setting(
        "none", "models beside the trained one", choices=("none", "swa", "wima", "swa+wima")
    ),
    "server.swa.start": Setting(0.75, "below 1 a share of all rounds, else a round", at_least=0),
    "server.swa.cycle": Setting(10, "rounds of a cycle of the client rate", at_least=1),
    "server.swa.rate_ratio": Setting(0.01, "lowest over highest rate of a cycle", at_least=0),
    "server.swa.capture": Setting(
        "lowest", "at which rate a model is averaged", choices=("lowest", "released")
    ),
    "server.swa.averaging": Setting(True, "False cycles the rate and averages nothing"),
    "server.wima.window": Setting(100, "models averaged", at_least=1),
    "server.wima.parameters": Setting("all", choices=("all", "classifier", "features")),

    "server.aggregate": Setting("mean", "of the uploads", choices=AGGREGATES),
    "server.trim": Setting(1, "of trimmed_mean: clients left out at each end", at_least=0),
    "server.foolsgold.kappa": Setting(1.0, "how soon clients are alike", above=0),
    "server.foolsgold.features": Setting("all", "what is compared", choices=FEATURES),
    "server.foolsgold.share": Setting("examples", "how weights are used", choices=SHARES),

    "attack.share": Setting(
        0.0, "of the members, whose uploads are poisoned", at_least=0, at_most=1
    ),
    "attack.factor": Setting(-1.0, "by which they multiply their uploads; -1 flips the sign"),
    "attack.seed": Setting(0, "who they are", at_least=0, below=2**32),

    "privacy.bound": Setting("none", "of a client's upload, then noise", choices=BOUNDS),
    "privacy.clip": Setting(1.0, "the fixed bound: largest norm of an upload", above=0),
    "privacy.noise": Setting(1.0, "deviation of the noise over the bound", at_least=0),
    "privacy.delta": Setting(0.0, "for which epsilon is computed; 0 is not", **_SHARE),
    "secure.sum": Setting(False, "uploads under masks: the server sees their sum"),
    "secure.fraction_bits": Setting(16, "of fixed point, of 32 bits", at_least=0, at_most=30),
    "secure.bound": Setting(1.0, "largest change of a parameter", above=0),
    "secure.threshold": Setting(1, "fewest uploads that can be opened", at_least=1),
    "secure.dropout": Setting(0.0, "chance that an upload is lost", **_SHARE),

    "wire.up": Setting("none", "codec of what clients send"),
    "wire.down": Setting("none", "codec of what clients receive"),
    "wire.rate_down": Setting(
        0.0, "the rate of wire.down, if it is not wire.rate; 0 is that", at_least=0, at_most=1
    ),
    "wire.feedback": Setting(False, "what a packet leaves out is added to the next one"),
    "wire.cache": Setting(
        0, "updates whose sums the server keeps for clients that come back; 0: none is missed",
        at_least=0,
    ),

    "submodel.tiers": Setting(
        (), "shares of every hidden layer's units, of which a client trains one; () is all units",
        items=float,
    ),
    "submodel.units": Setting("random", "which units a client has", choices=CHOICES),
    "submodel.assignment": Setting(
        "drawn", "a tier per client and round, or each client its own", choices=ASSIGNMENTS
    ),
    "submodel.coverage": Setting(False, "means over the clients that have a weight, not over all"),

    "groups.name": Setting(
        "random", "how groups that train in sequence, or clusters, are made",
        choices=(*GROUPINGS, NAMES),
    ),
    "groups.clients": Setting(2, "K_S,max: clients in a group, at most", at_least=1),
    "groups.examples": Setting(
        0, "D_min: a group is closed once it has so many; 0: its clients decide", at_least=0
    ),
    "groups.count": Setting(
        0, "so many groups of one size; 0: as the limits say (hierfavg: 2)", at_least=0
    ),
    "groups.passes": Setting(1, "E_S: times around a group in a round", at_least=1),
    "groups.seed": Setting(
        0, "apart from the training seed, so that seeds share their groups", at_least=0, below=2**32
    ),
    "groups.metric": Setting("cosine", "of greedy: how far a client is", choices=tuple(METRICS)),
    "groups.start": Setting(
        "random", "of greedy: the first client of a group", choices=("random", "released")
    ),
    "groups.clusters": Setting(0, "of kmeans; 0 is the number of classes", at_least=0),
    "groups.estimator": Setting(
        "clf", "what is known of clients: classifiers, confidences, task2vec, or their labels",
        choices=("clf", "conf", "task2vec", "labels"),
    ),
    "groups.epochs": Setting(10, "that clients train for it", at_least=1),
    "groups.variance": Setting(0.9, "of clf, that PCA keeps", above=0, at_most=1),
    "groups.public": Setting(10, "of conf: test examples per class, not evaluated", at_least=1),
    "groups.reading": Setting("softmax", "of conf: how shares are made", choices=READINGS),
    "groups.probe": Setting("", "of task2vec: a model's name; without, model.name"),
    "groups.weights": Setting("", "of task2vec: the probe's pretrained weights"),

    "cohort.size": Setting(10, at_least=1),
    "cohort.share": Setting(
        0.0, "of all clients, or groups, instead of a size; 0 is the size (fedseq2par: 0.2)",
        at_least=0, at_most=1,
    ),
    "cohort.sampling": Setting(
        "uniform", "once: nobody again before everybody had a turn; sizes: by examples; apart: "
        "no place has the same client twice running; deadline, tiers: by the clock",
        choices=("uniform", "bernoulli", "once", "sizes", "apart", *SELECTIONS),
    ),
    "cohort.deadline": Setting(10.0, "seconds within which a client must be back", above=0),
    "cohort.candidates": Setting(20, "clients that are asked how long they would take", at_least=1),
    "cohort.tiers": Setting(5, "groups of equally fast clients", at_least=1),
    "clock.speed": Setting(
        "none", "law of clients' seconds per example, e.g. lognormal(0.01, 0.5); none: no clock"
    ),
    "clock.delay": Setting("constant(0)", "law of the seconds on the way, of every dispatch"),
    "cohort.strategy": Setting("auto", "auto | vmap | map | chunked | sharded"),
    "cohort.chunk": Setting(
        0, "clients at once on a device, if chunked or sharded; 0: 8 if chunked, else all",
        at_least=0,
    ),
    "cohort.devices": Setting(0, "if sharded: how many, 0 for all", at_least=0),
    "cohort.client_state": Setting("auto", "where it is kept: auto | device | host"),

    "eval.every": Setting(10, at_least=1),
    "eval.window": Setting(10, "every one of the last rounds; reported is their mean", at_least=1),
    "eval.splits": Setting(("test",)),
    "eval.clients": Setting(
        False, "every model on each client's examples too: fairness.*, clients.jsonl"
    ),
    "eval.absent": Setting(
        0, "personal models of so many clients on the test split too, for their accuracy of "
        "classes that they have and lack; -1 is all", at_least=-1,
    ),
    "eval.batch_size": Setting(500, at_least=1),
    "eval.statistics": Setting(
        "model", "BatchNorm's on a split: the model's, those of the split (AdaBN), of each batch",
        choices=("model", "split", "batch"),
    ),

    "metrics.to": Setting(
        "none", "where metrics go beside metrics.jsonl: csv, tensorboard, wandb, joined by +"
    ),
    "metrics.cosine": Setting(False, "the angle between consecutive moves of the global model"),

    "curvature.every": Setting(0, "rounds; 0 is never", at_least=0),
    "curvature.examples": Setting(0, "the first so many of train; 0 is all", at_least=0),
    "curvature.depth": Setting(20, "products with the Hessian for lambda_1", at_least=2),
    "curvature.trace_probes": Setting(0, "products for the trace", at_least=0),
    "curvature.clients": Setting(0, "local models of so many clients too; -1 is all", at_least=-1),

    "checkpoint.every": Setting(50, at_least=1),
    "checkpoint.keep": Setting(2, at_least=1),
}
# Whose settings stand beside the name that chooses among them.
BESIDE: dict[str, Registry[Any]] = {
    "data": SOURCES, "data.shift": SHIFTS, "data.style": STYLES, "partition": PARTITIONS,
    "model": MODELS, "task": TASKS, "wire": CODECS,
}


def all_settings() -> dict[str, Setting]:
    """Every setting there is, of whatever is registered; of one name, the first's default."""
    found = dict(SETTINGS)
    for section, table in BESIDE.items():
        for entry in table.values():
            for name, setting in entry.settings.items():
                found.setdefault(f"{section}.{name}", setting)
    for method in METHODS.values():
        for name, setting in method.settings.items():
            found.setdefault(f"algorithm.{method.section}.{name}", setting)
    return found


def default_config() -> ml_collections.ConfigDict:
    """FedAvg on the embedded digits, and every setting there is.

    Where several models (or partitions, or tasks) have a setting of one name with other defaults,
    it is None until it is set, which stands for the chosen one's own.
    """
    config = ml_collections.ConfigDict()
    for name, setting in all_settings().items():
        node, last = _node(config, name)
        node[last] = setting.default
    for section, table in BESIDE.items():
        for name in {n for entry in table.values() for n in entry.settings}:
            defaults = [e.settings[name].default for e in table.values() if name in e.settings]
            if any(d != defaults[0] for d in defaults):
                kinds = {type(d) for d in defaults}
                kind = kinds.pop() if len(kinds) == 1 else object
                config[section][name] = config_dict.placeholder(kind)
    return config.lock()


def _node(config: Any, name: str) -> tuple[Any, str]:
    *path, last = name.split(".")
    for part in path:
        if part not in config:
            config[part] = ml_collections.ConfigDict()
        config = config[part]
    return config, last


def validate(config: ml_collections.ConfigDict) -> None:
    """Raises a UsageError for the first setting that cannot work, or has no effect."""
    if config.get("phases"):
        raise errors.UsageError(
            f"config.phases has {len(config.phases)} phases, each an experiment of its own: "
            "fedjax_flat.train trains them all, fedjax_flat.phase_configs(config) has their "
            "configs. Here one is needed."
        )
    flat, reference = flatten(config), flatten(default_config())
    for name in flat:
        if name not in reference:
            raise errors.UsageError(unknown(name))
    for name in reference:
        if name not in flat:
            raise errors.UsageError(
                f"config lacks {name!r}; start from fedjax_flat.default_config()."
            )
    choices = settings_of(config)
    for name, value in flat.items():
        if name in choices and value is not None:
            choices[name].check(f"config.{name}", value)
    usage.check_combination(config)
    for name, value in flat.items():
        if value != reference[name]:
            why = usage.why_unused(name, config, choices)
            if why:
                raise errors.UsageError(
                    f"config.{name} = {value!r} would change nothing: {why}. Leave it out. (A "
                    "config file that sets it for other cells of a table too can return "
                    "fedjax_flat.only_used(config).)"
                )


def unknown(name: str) -> str:
    """Of a setting that does not exist."""
    settings = all_settings()
    return f"config has no setting {name!r}." + errors.did_you_mean(name, settings)


def settings_of(config: ml_collections.ConfigDict) -> dict[str, Setting]:
    """The settings that the config's choices have: its method's, model's, partition's, task's."""
    found = dict(SETTINGS)
    for section, table in BESIDE.items():
        if section == "wire":
            chosen = [table.find(n) for n in (config.wire.up, config.wire.down) if n != "none"]
        elif section == "task" and config.task.name == "auto":
            chosen = list(table.values())
        else:
            chosen = [table.find(config[section].name)]
        for entry in chosen:
            found.update({f"{section}.{n}": s for n, s in entry.settings.items()})
    base, added = usage.methods_of(config)
    for method in (base, *added):
        found.update({f"algorithm.{method.section}.{n}": s for n, s in method.settings.items()})
    return found


def options_of(config: ml_collections.ConfigDict, section: str, entry: Any) -> dict[str, Any]:
    """The values of a chosen model's (partition's, task's) own settings."""
    given = {name: config[section][name] for name in entry.settings}
    return {n: entry.settings[n].default if v is None else v for n, v in given.items()}


def used(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """The settings that have an effect, with their values; flat names.

    Of phases: those that have one in some phase, and the phases with what is their own.
    """
    flat = flatten(config)
    if config.phases:
        some = {n for phase in config.phases for n in used(of_phase(config, phase))}
        return {n: v for n, v in flat.items() if v is not None and n in some | {"phases"}}
    del flat["phases"]
    choices = settings_of(config)
    names = [n for n in flat if not usage.why_unused(n, config, choices)]
    flat["server.momentum"] = usage.server_momentum(config)
    flat["model.random.features"] = usage.random_features(config)
    flat["cohort.share"] = usage.cohort_share(config)
    flat["groups.count"] = usage.group_count(config)
    return {n: choices[n].default if flat[n] is None else flat[n] for n in names}


def only_used(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """A copy with every setting that has no effect back at its default."""
    return from_flat(used(config))


def of_phase(
    config: ml_collections.ConfigDict, phase: Mapping[str, Any]
) -> ml_collections.ConfigDict:
    """The config of one entry of `config.phases`: what is common to all, and its own over it."""
    values = {**flatten(config), **flatten(phase), "phases": ()}
    return from_flat({n: v for n, v in values.items() if n != "name" and v is not None})


def from_flat(values: Mapping[str, Any]) -> ml_collections.ConfigDict:
    """The default config with these settings."""
    config = default_config()
    settings = all_settings()
    for name, value in values.items():
        if name not in settings:
            raise errors.UsageError(unknown(name))
        node, last = _node(config, name)
        try:
            node[last] = value
        except (TypeError, ValueError):
            settings[name].check(f"config.{name}", value)
            raise
    return config


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """{'client.momentum': 0.0, ...}."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if hasattr(value, "items"):
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = _as_tuples(value)
    return flat


def _as_tuples(value: Any) -> Any:
    """Lists, which JSON has, as tuples; inside phases too."""
    if isinstance(value, dict):
        return {name: _as_tuples(v) for name, v in value.items()}
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


def to_json(config: ml_collections.ConfigDict) -> str:
    """What the experiment uses, as readable JSON, in the order of the settings."""
    nested: dict[str, Any] = {}
    for name, value in used(config).items():
        *path, last = name.split(".")
        node = nested
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return json.dumps(nested, indent=2) + "\n"


def from_json(text: str) -> ml_collections.ConfigDict:
    """What `to_json` wrote; settings added since then take their defaults, old names their new."""
    try:
        tree = json.loads(text)
    except RecursionError:
        raise errors.UsageError("a config of brackets beyond all depth.") from None
    if not isinstance(tree, dict):
        raise errors.UsageError(
            f"a config that is the JSON of a {type(tree).__name__}: expected settings by name."
        )
    values = flatten(tree)
    if values.pop("tensorboard", False):
        values["metrics.to"] = "tensorboard"
    return from_flat(values)


def arguments(text: str, **defaults: Any) -> ml_collections.ConfigDict:
    """The options after the colon of `--config FILE:a,swa,alpha=0.5`, as typed as `defaults`.

    A word without `=` switches on the option of that name; any other word is the first option's.
    """
    options = ml_collections.ConfigDict(defaults)
    for word in filter(None, text.split(",")):
        name, given, value = word.partition("=")
        if not given and not isinstance(defaults.get(name), bool):
            name, value = next(iter(defaults)), word
        if name not in defaults:
            raise errors.UsageError(
                f"config file has no option {name!r} (in {text!r}): expected "
                f"{', '.join(defaults)}." + errors.did_you_mean(name, defaults)
            )
        kind = type(defaults[name])
        try:
            options[name] = True if kind is bool and not given else _parse(kind, value)
        except (KeyError, ValueError):
            raise errors.UsageError(
                f"config file option {word!r}: expected {kind.__name__}, e.g. {defaults[name]!r}."
            ) from None
    return options


def _parse(kind: type, value: str) -> Any:
    return {"true": True, "false": False}[value.lower()] if kind is bool else kind(value)


def is_free(name: str) -> bool:
    """Whether a setting may differ between two runs of one run folder."""
    return any(name == free or name.startswith(f"{free}.") for free in (*FREE, "imports"))


def differences(old: ml_collections.ConfigDict, new: ml_collections.ConfigDict) -> list[str]:
    """The settings in which two configs would train differently, as `name: old -> new`.

    Imported files are compared by what is in them, by the run folder.
    """
    a, b = used(old), used(new)
    for config, flat in ((old, a), (new, b)):
        if "swa" in usage.averages(config):  # a fraction of other rounds is another start
            flat["server.swa.start"] = usage.swa_start(config)
    return [
        f"{name}: {a.get(name)!r} -> {b.get(name)!r}"
        for name in dict.fromkeys((*b, *a))
        if a.get(name) != b.get(name) and not is_free(name)
    ]
