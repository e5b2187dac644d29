"""What an experiment is: every setting, its default, and what makes it invalid.

A config is a locked `ml_collections.ConfigDict`: an unknown name fails at once and names the
nearest valid one. Files in `configs/` start from `default_config()` and change what they need.
"""

import json
from typing import Any

import ml_collections

from fedjax_flat import errors

# May differ between two runs of one run folder: they change how long and how closely we look at
# training, never a bit of it.
FREE = ("rounds", "rounds_per_dispatch", "eval", "curvature", "checkpoint", "tensorboard", "debug")


# Read by the methods of these names: the papers' values for the CNN on CIFAR-10, where they say.
METHOD_SETTINGS: dict[str, dict[str, Any]] = {
    "fedprox": {"mu": 0.1},
    "scaffold": {"option": 2},  # fedgamma too
    "feddyn": {"alpha": 0.01, "average_model": False},
    "adabest": {"mu": 0.02, "beta": 0.9},
    "mime": {"momentum": 0.9},  # mimelite too
    "fedcm": {"alpha": 0.1},  # mofedsam too
    "fedacg": {"momentum": 0.85, "beta": 0.01},
    "fedspeed": {"alpha": 0.95, "prox": 100.0, "normalised": False},
    "fedsmoo": {"beta": 10.0},
    # naivefedgloss too; rho is the server's, client.rho the clients'
    "fedgloss": {"rho": 0.15, "beta": 10.0, "duals": True, "measured": False, "variant": "paper"},
    "fedgh": {"scope": "model"},
}


def default_config() -> ml_collections.ConfigDict:
    """FedAvg on the embedded digits; the reference of all settings."""
    c = ml_collections.ConfigDict()
    c.seed = 0
    c.rounds = 100
    c.rounds_per_dispatch = 50  # at most; the loop takes fewer when rounds are long
    c.debug = False  # without jit, naming client, step and tensor of the first non-finite value
    c.tensorboard = False

    c.data = ml_collections.ConfigDict()
    c.data.name = "digits"
    c.data.crop_padding = 0
    c.data.flip = False
    c.data.cutout = 0  # side of the square in pixels; 0 is none
    c.data.mixup = 0.0  # alpha of Beta(alpha, alpha); 0 is none

    c.partition = ml_collections.ConfigDict()
    c.partition.name = "dirichlet"  # iid | dirichlet | released
    c.partition.clients = 20  # released: ignored
    c.partition.alpha = 0.5  # dirichlet: 0 is one class per client
    c.partition.size_sigma = 0.0  # deviation of log sizes; 0 is equal sizes
    c.partition.seed = 0  # apart from the training seed, so that seeds share their clients
    c.partition.file = ""  # released: path of fedsam-splits.npz
    c.partition.split = ""  # released: e.g. cifar10_alpha_0.05

    c.model = ml_collections.ConfigDict()
    c.model.name = "mlp"
    c.model.precision = "float32"  # float32 | bfloat16 (sums, parameters and loss stay float32)

    c.algorithm = ml_collections.ConfigDict()
    c.algorithm.name = "fedavg"
    c.algorithm.weighting = "examples"  # examples | uniform
    for method, settings in METHOD_SETTINGS.items():
        c.algorithm[method] = ml_collections.ConfigDict(settings)

    c.client = ml_collections.ConfigDict()
    c.client.learning_rate = 0.1
    c.client.learning_rate_decay = 1.0  # the round's rate is learning_rate * decay ** round
    c.client.momentum = 0.0
    c.client.weight_decay = 0.0
    c.client.clip = 0.0  # largest norm of the gradient; 0 is any
    c.client.batch_size = 16
    c.client.epochs = 1
    c.client.steps = 0  # when positive, this many local steps instead of epochs
    c.client.sharpness = "none"  # none | sam | asam
    c.client.rho = 0.1  # radius of the ascent
    c.client.rho_start = 0.001  # where a warm-up of rho begins
    c.client.rho_warmup = 0  # its length in rounds; 0 is a constant rho
    c.client.eta = 0.2  # asam: added to |w|
    c.client.asam_scale = "kernels"  # kernels | all (biases and normalisation parameters too)

    c.server = ml_collections.ConfigDict()
    c.server.optimizer = "sgd"  # sgd | adam | adagrad | yogi
    c.server.learning_rate = 1.0
    c.server.momentum = 0.0  # sgd only
    c.server.adaptive = ml_collections.ConfigDict()  # adam, adagrad, yogi
    c.server.adaptive.learning_rate = 0.01
    c.server.adaptive.beta1 = 0.9
    c.server.adaptive.beta2 = 0.99
    c.server.adaptive.tau = 1e-3
    c.server.adaptive.epsilon = "outside"  # of the root | inside
    c.server.adaptive.bias_correction = False
    c.server.average = "none"  # none | swa | wima | swa+wima: models kept beside the trained one
    c.server.swa = ml_collections.ConfigDict()
    c.server.swa.start = 0.75  # below 1 a fraction of all rounds, else a round
    c.server.swa.cycle = 10  # rounds per cycle of the client rate; 1 leaves it constant
    c.server.swa.rate_ratio = 0.01  # lowest over highest rate of a cycle, gamma_2 / gamma_1
    c.server.swa.capture = "lowest"  # lowest | released: at which rate a model is averaged
    c.server.swa.averaging = True  # False cycles the rate and averages nothing
    c.server.wima = ml_collections.ConfigDict()
    c.server.wima.window = 100  # models averaged
    c.server.wima.parameters = "all"  # all | classifier | features

    c.cohort = ml_collections.ConfigDict()
    c.cohort.size = 10
    c.cohort.sampling = "uniform"  # uniform | bernoulli
    c.cohort.strategy = "auto"  # auto | vmap | map | chunked | sharded
    c.cohort.chunk = 8
    c.cohort.devices = 0  # sharded: how many, 0 for all
    c.cohort.client_state = "auto"  # auto | device | host: where all clients' state is kept

    c.eval = ml_collections.ConfigDict()
    c.eval.every = 10
    c.eval.window = 10  # every one of the last rounds; the reported number is their mean
    c.eval.splits = ("test",)
    c.eval.batch_size = 500

    c.curvature = ml_collections.ConfigDict()  # of the Hessian on the train split, as metrics
    c.curvature.every = 0  # rounds; 0 is never
    c.curvature.examples = 0  # the first so many; 0 is all
    c.curvature.depth = 20  # products with the Hessian for lambda_1
    c.curvature.trace_probes = 0  # products for the trace
    c.curvature.clients = 0  # local models of the first so many clients too; -1 is all

    c.checkpoint = ml_collections.ConfigDict()
    c.checkpoint.every = 50
    c.checkpoint.keep = 2
    return c.lock()


_AT_LEAST: dict[str, float] = {
    "rounds": 1, "rounds_per_dispatch": 1, "seed": 0,
    "data.crop_padding": 0, "data.cutout": 0, "data.mixup": 0,
    "partition.clients": 1, "partition.alpha": 0, "partition.size_sigma": 0, "partition.seed": 0,
    "client.learning_rate": 0, "client.momentum": 0, "client.weight_decay": 0,
    "client.clip": 0, "server.adaptive.learning_rate": 0,
    "client.batch_size": 1, "client.epochs": 1, "client.steps": 0, "client.learning_rate_decay": 0,
    "client.rho": 0, "client.rho_start": 0, "client.rho_warmup": 0, "client.eta": 0,
    "server.learning_rate": 0, "server.momentum": 0,
    "server.swa.start": 0, "server.swa.cycle": 1, "server.swa.rate_ratio": 0,
    "server.wima.window": 1,
    "cohort.size": 1, "cohort.chunk": 1, "cohort.devices": 0,
    "eval.every": 1, "eval.window": 1, "eval.batch_size": 1,
    "curvature.every": 0, "curvature.examples": 0, "curvature.depth": 2,
    "curvature.trace_probes": 0, "curvature.clients": -1,
    "checkpoint.every": 1, "checkpoint.keep": 1,
}
_BELOW_ONE = (
    "client.momentum", "server.momentum", "server.adaptive.beta1", "server.adaptive.beta2",
)


def validate(config: ml_collections.ConfigDict) -> None:
    """Raises a UsageError for the first setting that cannot work."""
    flat, reference = flatten(config), flatten(default_config())
    for name, value in flat.items():
        if name not in reference:
            raise errors.UsageError(
                f"config has no setting {name!r}." + errors.did_you_mean(name, reference)
            )
        expected = type(reference[name])
        allowed = (int, float) if expected is float else expected
        if not isinstance(value, allowed) or (isinstance(value, bool) and expected is not bool):
            raise errors.UsageError(
                f"config.{name} = {value!r} is a {type(value).__name__}; expected "
                f"{expected.__name__}, e.g. {reference[name]!r}."
            )
        if name in _AT_LEAST and not value >= _AT_LEAST[name]:
            raise errors.UsageError(
                f"config.{name} = {value}: expected {_AT_LEAST[name]} or more."
            )
        if name in _BELOW_ONE and value >= 1:
            raise errors.UsageError(f"config.{name} = {value}: expected less than 1.")
    for name in reference:
        if name not in flat:
            raise errors.UsageError(
                f"config lacks {name!r}; start from fedjax_flat.default_config()."
            )


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """{'client.momentum': 0.0, ...}."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if hasattr(value, "items"):
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = tuple(value) if isinstance(value, list | tuple) else value
    return flat


def to_json(config: ml_collections.ConfigDict) -> str:
    """Readable JSON, in the order of the settings."""
    return json.dumps(config.to_dict(), indent=2) + "\n"


def from_json(text: str) -> ml_collections.ConfigDict:
    """What `to_json` wrote; settings added since then take their defaults."""
    config = default_config()
    values = json.loads(text)
    for name, value in flatten(values).items():
        *path, last = name.split(".")
        node = config
        for part in path:
            node = node[part]
        node[last] = value
    return config


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


def averages(config: ml_collections.ConfigDict) -> list[str]:
    """The names in server.average."""
    names = config.server.average.split("+")
    for name in names:
        errors.lookup("server average", name, dict.fromkeys(("none", "swa", "wima")))
    return [name for name in names if name != "none"]


def swa_start(config: ml_collections.ConfigDict) -> int:
    """The round, counted from 1, in which SWA starts."""
    start = config.server.swa.start
    return max(1, int(start * config.rounds if start < 1 else start))


def differences(old: ml_collections.ConfigDict, new: ml_collections.ConfigDict) -> list[str]:
    """The settings in which two configs would train differently, as `name: old -> new`."""
    a, b = flatten(old), flatten(new)
    for config, flat in ((old, a), (new, b)):
        if "swa" in averages(config):  # a fraction of other rounds is another start
            flat["server.swa.start"] = swa_start(config)
    return [
        f"{name}: {a.get(name)!r} -> {b.get(name)!r}"
        for name in b
        if name.split(".")[0] not in FREE and a.get(name) != b.get(name)
    ]
