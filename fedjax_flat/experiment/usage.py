"""Which settings have an effect on an experiment, and what does not go together.

Both are facts about the whole config, so they stand in one place: `why_unused` says why a setting
changes nothing, `check_combination` refuses what a method cannot be combined with.
"""

from collections.abc import Callable, Mapping
from typing import Any

from fedjax_flat import errors
from fedjax_flat.algorithms import METHODS, Method
from fedjax_flat.data.augment import check_crops
from fedjax_flat.models import MODELS
from fedjax_flat.server import ADAPTIVE
from fedjax_flat.settings import Setting
from fedjax_flat.wire import CODECS, Codec

Config = Any  # ml_collections.ConfigDict, whose attributes are the settings


AVERAGES = ("swa", "wima")
LOGGERS = ("csv", "tensorboard", "wandb")


def methods_of(config: Config) -> tuple[Method, list[Method]]:
    """What `algorithm.name` names: (FedDyn, [FedMLB]) of `feddyn+fedmlb+swa`.

    The method that others are added to is FedAvg if none is named.
    """
    first, *others = config.algorithm.name.split("+")
    known: dict[str, Method | None] = {**METHODS, **dict.fromkeys(AVERAGES)}
    named = [METHODS.find(first), *(errors.lookup("algorithm", name, known) for name in others)]
    methods = [m for m in named if m is not None]
    bases = [m for m in methods if m.make]
    if len(bases) > 1:
        raise errors.UsageError(
            f"algorithm.name = {config.algorithm.name!r}: {' and '.join(m.name for m in bases)} do "
            "not go together, each is a whole method. What can be added to one: "
            f"{', '.join(m.name for m in METHODS.values() if m.add)}; {', '.join(AVERAGES)}."
        )
    added = [m for m in methods if m.add]
    twice = [m.name for m in added if added.count(m) > 1]
    if twice:
        raise errors.UsageError(
            f"algorithm.name = {config.algorithm.name!r} has {twice[0]} twice. Leave one out."
        )
    return (bases or [METHODS["fedavg"]])[0], added


def method_of(config: Config) -> Method:
    """The method that others are added to, FedDyn of `feddyn+fedmlb+swa`, FedAvg of `fedsam`."""
    return methods_of(config)[0]


def asynchronous_of(config: Config) -> Method | None:
    """FedAsync or FedBuff, if it is named."""
    named = [m for m in methods_of(config)[1] if m.name in ("fedasync", "fedbuff")]
    return named[0] if named else None


def loggers(config: Config) -> list[str]:
    """Where metrics go beside metrics.jsonl: `csv+wandb`."""
    names = [] if config.metrics.to == "none" else config.metrics.to.split("+")
    for name in names:
        errors.lookup("metrics.to", name, dict.fromkeys(LOGGERS))
    return list(dict.fromkeys(names))


def averages(config: Config) -> list[str]:
    """The models kept beside the trained one: of server.average, and of the algorithm's name."""
    named = [name for name in config.algorithm.name.split("+") if name in AVERAGES]
    asked = [*named, *config.server.average.split("+")]
    return [name for name in dict.fromkeys(asked) if name != "none"]


def swa_start(config: Config) -> int:
    """The round, counted from 1, in which SWA starts."""
    start = config.server.swa.start
    return max(1, int(start * config.rounds if start < 1 else start))


def sharpness_of(config: Config) -> str:
    """none, sam or asam: the client's setting, or the one that a method is named for."""
    base, added = methods_of(config)
    named = [m.sharpness for m in (*added, base) if m.sharpness in ("sam", "asam")]
    return named[0] if named and config.client.sharpness == "none" else config.client.sharpness


def server_optimizer_of(config: Config) -> str:
    """The server optimiser's name: the method's, if it is named for one; `own` if it has none."""
    named = method_of(config).optimizer
    return named if named in (*ADAPTIVE, "own") else config.server.optimizer


def server_momentum(config: Config) -> float:
    """Of SGD on the server; a method that is named for it has 0.9 if none is set."""
    named = method_of(config).optimizer == "sgd with momentum"
    return config.server.momentum or (0.9 if named else 0.0)


def codec_settings(config: Config, way: str) -> Mapping[str, Setting]:
    """Of the codec that `wire.up` or `wire.down` names."""
    name = config.wire[way]
    return {} if name == "none" else CODECS.find(name).settings


def codec_of(config: Config, way: str) -> Codec | None:
    """The codec that `wire.up` or `wire.down` names, with its settings."""
    if config.wire[way] == "none":
        return None
    entry = CODECS.find(config.wire[way])
    given = {name: config.wire[name] for name in entry.settings}
    options = {n: entry.settings[n].default if v is None else v for n, v in given.items()}
    if way == "down" and "rate" in options and config.wire.rate_down:
        options["rate"] = config.wire.rate_down
    return entry.make(**options)


def random_features(config: Config) -> int:
    """How many the classifier reads; a method that is named for them has 5,000 if none is set."""
    named = "fed3r_rf" in config.algorithm.name.split("+")
    return config.model.random.features or (5000 if named else 0)


def prunes(config: Config) -> bool:
    """Whether clients' heads have their own labels only."""
    return any(m.name == "oll" for m in methods_of(config)[1])


def members_of(config: Config) -> str:
    """What a cohort consists of: clients, groups, clusters, or one chain (algorithms/method.py)."""
    base, added = methods_of(config)
    other = {m.name: m.members for m in (base, *added) if m.members != "clients"}
    if len(other) > 1:
        raise errors.UsageError(
            f"algorithm.name = {config.algorithm.name!r}: {' and '.join(other)} both say who "
            "trains after whom. Leave one out."
        )
    return next(iter(other.values()), "clients")


def grows(config: Config) -> bool:
    """Whether groups become more."""
    return "fedseq2par" in config.algorithm.name.split("+")


def cohort_share(config: Config) -> float:
    """Of the members that take part; groups that become more have 0.2 if none is set."""
    return config.cohort.share or (0.2 if grows(config) else 0.0)


def group_count(config: Config) -> int:
    """How many groups are asked for; there are 2 clusters if none is set."""
    return config.groups.count or (2 if members_of(config) == "clusters" else 0)


def estimator_of(config: Config) -> str:
    """What groups are made from; `none` if they are random."""
    if members_of(config) not in ("groups", "clusters") or config.groups.name == "random":
        return "none"
    if config.groups.name == "names":
        return "names"
    return "labels" if config.groups.name == "oracle" else config.groups.estimator


def takes_steps(c: Config) -> bool:
    """Whether clients take local steps."""
    return method_of(c).sharpness != "no steps"


def _ascends(c: Config) -> bool:
    return sharpness_of(c) != "none" or method_of(c).sharpness == "own"


def _group_normed(c: Config) -> bool:
    settings = MODELS.find(c.model.name).settings
    return "norm" not in settings or (c.model.norm or settings["norm"].default) == "group"


def _sgd_on_server(c: Config) -> bool:
    return server_optimizer_of(c) == "sgd"


def _by_weight(c: Config) -> bool:
    by_examples = c.server.aggregate == "foolsgold" and c.server.foolsgold.share == "examples"
    return c.server.aggregate == "mean" or by_examples


_MOVES = ("data.crop_padding", "data.rotation", "data.flip", "data.cutout", "data.scale",
          "data.crop", "data.jitter", "data.style.")
# name or section: (whether it has an effect, why not); all that fit a setting must hold
_RULES: list[tuple[tuple[str, ...], Callable[[Config], bool], str]] = [
    (("client.",), takes_steps, "clients take no local steps under {method}"),
    (("client.rho", "client.rho_start", "client.rho_warmup"), _ascends,
     "there is no ascent: client.sharpness is none"),
    (("client.rho_start",), lambda c: c.client.rho_warmup > 0, "client.rho_warmup is 0"),
    (("client.eta", "client.asam_scale"), lambda c: sharpness_of(c) == "asam",
     "it is ASAM's, and client.sharpness is not asam"),
    (("client.epochs",), lambda c: c.client.steps == 0, "client.steps is the number of steps"),
    (("client.momentum", "client.nesterov"), lambda c: c.client.optimizer == "sgd",
     "it is of sgd, and client.optimizer is not"),
    (("client.nesterov",), lambda c: c.client.momentum > 0, "client.momentum is 0"),
    (("client.options",), lambda c: c.client.optimizer != "sgd",
     "sgd has client.momentum and client.nesterov instead"),
    (("server.optimizer", "server.learning_rate", "server.momentum", "server.adaptive."),
     lambda c: server_optimizer_of(c) != "own", "the server step is part of {method}"),
    (("server.learning_rate",), _sgd_on_server,
     "it is of sgd; {server} has server.adaptive.learning_rate"),
    (("server.momentum",), _sgd_on_server, "it is of sgd; {server} has server.adaptive.beta1"),
    (("server.adaptive.",), lambda c: server_optimizer_of(c) in ADAPTIVE,
     "it is of adam, adagrad and yogi, and the server optimiser is {server}"),
    (("server.adaptive.beta2",), lambda c: server_optimizer_of(c) != "adagrad",
     "adagrad has no beta2"),
    (("server.adaptive.initial",),
     lambda c: not c.server.adaptive.bias_correction or server_optimizer_of(c) == "adagrad",
     "server.adaptive.bias_correction starts v at 0"),
    (("algorithm.weighting",),
     lambda c: method_of(c).name != "adabest" or c.algorithm.adabest.variant == "paper",
     "the released AdaBest counts every client once"),
    (("server.swa.",), lambda c: "swa" in averages(c), "server.average has no swa"),
    (("server.swa.rate_ratio",), lambda c: c.server.swa.cycle > 1,
     "a cycle of one round leaves the rate constant"),
    (("server.wima.",), lambda c: "wima" in averages(c), "server.average has no wima"),
    (("wire.rate_down",), lambda c: "rate" in codec_settings(c, "down"),
     "wire.down has no rate"),
    (("wire.feedback",), lambda c: c.wire.up != "none" or c.wire.down != "none",
     "nothing is encoded: wire.up and wire.down are none"),
    (("wire.cache",), lambda c: c.wire.down != "none",
     "clients receive the model itself: wire.down is none"),
    (("server.trim",), lambda c: c.server.aggregate == "trimmed_mean",
     "server.aggregate is not trimmed_mean"),
    (("server.foolsgold.",), lambda c: c.server.aggregate == "foolsgold",
     "server.aggregate is not foolsgold"),
    (("privacy.clip",), lambda c: c.privacy.bound == "fixed", "privacy.bound is not fixed"),
    (("privacy.noise", "privacy.delta"), lambda c: c.privacy.bound != "none",
     "privacy.bound is none"),
    (("secure.fraction_bits", "secure.bound", "secure.threshold", "secure.dropout"),
     lambda c: c.secure.sum, "secure.sum is False"),
    (("algorithm.weighting",), lambda c: c.privacy.bound == "none" and _by_weight(c),
     "clients weigh the same with privacy, trimmed means and medians"),
    (("submodel.units", "submodel.assignment", "submodel.coverage"),
     lambda c: len(c.submodel.tiers) > 0, "submodel.tiers is empty: clients train all units"),
    (("submodel.assignment",), lambda c: len(c.submodel.tiers) > 1, "there is one tier"),
    (("clock.delay",), lambda c: c.clock.speed != "none", "there is no clock: clock.speed is none"),
    (("cohort.sampling",), lambda c: not asynchronous_of(c), "who comes back is up to the clock"),
    (("cohort.deadline", "cohort.candidates"), lambda c: c.cohort.sampling == "deadline",
     "cohort.sampling is not deadline"),
    (("cohort.tiers",), lambda c: c.cohort.sampling == "tiers", "cohort.sampling is not tiers"),
    (("cohort.chunk",), lambda c: c.cohort.strategy in ("chunked", "sharded", "auto"),
     "cohort.strategy is neither chunked nor sharded"),
    (("cohort.devices",), lambda c: c.cohort.strategy in ("auto", "sharded"),
     "cohort.strategy is not sharded"),
    (("attack.factor", "attack.seed"), lambda c: c.attack.share > 0, "attack.share is 0"),
    (("groups.",), lambda c: members_of(c) in ("groups", "clusters"),
     "algorithm.name has no groups"),
    (("groups.passes",), lambda c: members_of(c) == "groups", "clusters train side by side"),
    (("groups.clients", "groups.examples", "groups.count"), lambda c: not grows(c),
     "groups of fedseq2par are as many as algorithm.fedseq2par says"),
    (("groups.clients", "groups.examples"), lambda c: group_count(c) == 0,
     "groups.count is the number of groups"),
    (("groups.metric", "groups.start"), lambda c: c.groups.name == "greedy",
     "groups.name is not greedy"),
    (("groups.clusters",), lambda c: c.groups.name == "kmeans", "groups.name is not kmeans"),
    (("groups.estimator",), lambda c: c.groups.name in ("kmeans", "greedy", "icg"),
     "groups.name needs no estimates, or has its own"),
    (("groups.seed",), lambda c: c.groups.name != "names", "the names of clients say it"),
    (("groups.epochs",), lambda c: estimator_of(c) in ("clf", "conf", "task2vec"),
     "nobody trains for the estimates"),
    (("groups.variance",), lambda c: estimator_of(c) == "clf", "the estimator is not clf"),
    (("groups.public", "groups.reading"), lambda c: estimator_of(c) == "conf",
     "the estimator is not conf"),
    (("groups.probe", "groups.weights"), lambda c: estimator_of(c) == "task2vec",
     "the estimator is not task2vec"),
    (("cohort.size",), lambda c: cohort_share(c) == 0, "cohort.share says how many take part"),
    (("cohort.sampling",), lambda c: members_of(c) != "clusters" and not grows(c),
     "{method} draws its cohorts its own way"),
    (("curvature.",), lambda c: c.curvature.every > 0, "curvature.every is 0"),
    (("model.groups",), _group_normed, "it is of GroupNorm, and model.norm is not group"),
    (("data.unlabelled",), lambda c: method_of(c).unlabelled, "{method} does not learn from it"),
    (("eval.absent",), lambda c: "test" in c.eval.splits, "eval.splits has no test"),
    (("data.closed",), lambda c: c.data.local_test > 0, "data.local_test is 0"),
    (("data.validation_from",), lambda c: c.data.validation > 0, "data.validation is 0"),
    ((*_MOVES, "data.mixup"), takes_steps, "{method} sees the examples as they are"),
    ((*_MOVES, "model.dropout", "model.statistics"), lambda c: not c.data.features,
     "data.features are computed once, of the examples as they are"),
    (("model.statistics",), lambda c: c.client.frozen != "features",
     "statistics of frozen features stay as they are"),
    (("model.statistics",), takes_steps, "statistics stay as they are under {method}"),
    (("task.margin",), lambda c: c.task.loss != "multi_similarity",
     "task.loss multi_similarity has no margin"),
    (("task.alpha", "task.beta", "task.base", "task.epsilon"),
     lambda c: c.task.loss == "multi_similarity", "task.loss is not multi_similarity"),
    (("task.negatives", "task.positive"),
     lambda c: c.task.loss == "triplet" or c.task.mine_every > 0,
     "task.loss is not triplet, and task.mine_every is 0"),
    (("task.dimensions",), lambda c: not c.model.name.endswith("_gem"),
     "model.channels and model.embedding say it"),
    (("task.mine_every",), takes_steps, "{method} takes no local steps"),
    (("task.hard_of",), lambda c: c.task.hard < 1, "task.hard is 1: all pixels count"),
    (("data.unseen",), lambda c: c.data.split != "published", "the published lists say it"),
    (("model.fix_after",), lambda c: c.model.statistics != "frozen",
     "model.statistics is frozen, from the first round on"),
    (("model.fix_after",), takes_steps, "statistics stay as they are under {method}"),
    (("data.trains",), lambda c: c.data.labelled != "none", "data.labelled is none"),
    (("algorithm.ladd.least", "algorithm.ladd.most"), lambda c: c.algorithm.ladd.clusters == 0,
     "algorithm.ladd.clusters says how many"),
    (("algorithm.ladd.window", "algorithm.ladd.starts", "algorithm.ladd.kept",
      "algorithm.ladd.restyle", "algorithm.ladd.own"), lambda c: c.algorithm.ladd.clusters != 1,
     "there is one cluster"),
    (("algorithm.ladd.distilled",), lambda c: c.algorithm.ladd.kd > 0, "algorithm.ladd.kd is 0"),
    (("algorithm.mcd.steps",), lambda c: c.algorithm.mcd.form == "federated",
     "every step of algorithm.mcd.form central has one"),
    (("algorithm.fedcg.rank",), lambda c: c.algorithm.fedcg.mixing == "bottleneck",
     "algorithm.fedcg.mixing is not bottleneck"),
    (("algorithm.fedcg.beta",), lambda c: c.algorithm.fedcg.graph == "learned",
     "algorithm.fedcg.graph is fixed"),
    (("data.rdn_groups",), lambda c: c.data.rdn, "data.rdn is False"),
    (("data.mean", "data.std"), lambda c: not c.data.rdn,
     "data.rdn normalises by clients' statistics"),
    (("model.random.sigma", "model.random.law"), lambda c: random_features(c) > 0,
     "model.random.features is 0"),
    (("algorithm.weighting", "wire."), lambda c: method_of(c).weighs,
     "{method} adds up what clients send, as it is"),
]
_ALWAYS = {"client.batch_size", "curvature.every"}


def why_unused(name: str, config: Config, choices: Mapping[str, Setting]) -> str | None:
    """Why this setting has no effect on the experiment; None if it has one."""
    if name in _ALWAYS:
        return None
    method, server = method_of(config), server_optimizer_of(config)
    if name not in choices:
        section, _, last = name.rpartition(".")
        if section.startswith("algorithm."):
            whose = [m.name for m in METHODS.values() if f"algorithm.{m.section}" == section]
            return f"it is of {' and '.join(whose)}, and algorithm.name is {config.algorithm.name}"
        if section == "wire":
            whose = [n for n, entry in CODECS.items() if last in entry.settings]
            return (f"it is of {', '.join(whose)}, and wire.up is {config.wire.up}, wire.down "
                    f"{config.wire.down}")
        return f"{section} {config[section].name} has no {last}"
    for names, holds, why in _RULES:
        meant = any(name == n or (n.endswith(".") and name.startswith(n)) for n in names)
        if meant and not holds(config):
            return why.format(method=method.name, server=server)
    return None


def check_combination(config: Config) -> None:
    """Refuses what a method cannot be combined with, and says why."""
    (method, added), client, server = methods_of(config), config.client, config.server
    averages(config)
    loggers(config)
    check_crops(config.data.crop_padding, config.data.resized_crop)

    def refuse(setting: str, value: Any, why: str) -> None:
        raise errors.UsageError(f"{setting} = {value} does not go with {method.name}: {why}")

    if added and not takes_steps(config):
        raise errors.UsageError(
            f"algorithm.name = {config.algorithm.name!r}: {added[0].name} changes what local steps "
            f"do, and {method.name} takes none. Add it to fedavg."
        )
    if method.sharpness == "own" and sharpness_of(config) != "none":
        refuse("client.sharpness", sharpness_of(config), "it has an ascent of its own, of radius "
               "client.rho. Leave client.sharpness at none.")
    if method.sharpness == "none" and sharpness_of(config) != "none":
        refuse("client.sharpness", sharpness_of(config), "its steps are not along a gradient of "
               "the loss. Leave client.sharpness at none.")
    for other in added:
        if other.sharpness in ("sam", "asam") and other.sharpness != sharpness_of(config):
            raise errors.UsageError(
                f"client.sharpness = {sharpness_of(config)} does not go with {other.name}: the "
                f"name means {other.sharpness}."
            )
    of_labels = ("none", "flip_labels", "swap_labels")
    if config.data.features and config.data.shift.name not in of_labels:
        raise errors.UsageError(
            f"data.features = True does not go with data.shift.name = {config.data.shift.name!r}: "
            "features are computed once, of the examples as they are stored. Leave one out."
        )
    if config.data.rdn and config.data.shift.name == "swap_labels":
        raise errors.UsageError(
            "data.rdn does not go with data.shift.name = swap_labels: who attacks is known only "
            "after statistics are. Leave one out."
        )
    if config.data.features and config.data.rdn:
        raise errors.UsageError(
            "data.features = True does not go with data.rdn: features are computed once, and "
            "images are normalised anew in every step. Leave one out."
        )
    if method.styles and config.data.trains == "server":
        refuse("data.trains", "server", "its clusters are of clients.")
    if config.data.rdn and config.data.style.name != "none":
        raise errors.UsageError(
            f"data.rdn does not go with data.style.name = {config.data.style.name!r}: statistics "
            "are of the images as they are. Leave one out."
        )
    if method.client_optimizer == "sgd" and client.optimizer != "sgd":
        refuse("client.optimizer", client.optimizer, "its equations count on the steps of SGD.")
    if method.optimizer in ADAPTIVE and server.optimizer not in ("sgd", method.optimizer):
        refuse("server.optimizer", server.optimizer, f"the name means {method.optimizer}.")
    if method.optimizer == "sgd with momentum" and server.optimizer != "sgd":
        refuse("server.optimizer", server.optimizer, "the name means SGD with momentum.")
    _check_wire(config)
    if method.unlabelled and not config.data.unlabelled:
        raise errors.UsageError(
            f"{method.name} with data.unlabelled = 0: expected a share of the train examples for "
            "the server, e.g. 0.1."
        )
    if method.labelled:
        _check_labelled(config)
    if method.network and config.model.statistics == "own":
        refuse("model.statistics", "own", "what it adds to the network is kept beside statistics, "
               "and is the server's. Choose averaged or layers.")
    if method.network and config.submodel.tiers:
        refuse("submodel.tiers", config.submodel.tiers, "what it adds to the network cannot be "
               "narrower. Leave it out.")
    if method.name == "fednova" and client.nesterov:
        refuse("client.nesterov", True, "its norms are of plain SGD and of momentum as it is.")
    _check_uploads(config)
    _check_clock(config)
    _check_members(config)
    if config.partition.virtual:
        _check_virtual(config)
    if method.section == "mime" and client.momentum:
        refuse("client.momentum", client.momentum, "its momentum is algorithm.mime.momentum.")


def _check_labelled(config: Config) -> None:
    """Of a method that learns from the server's labelled examples, by steps of its own."""
    method, added = methods_of(config)
    if config.data.labelled == "none":
        raise errors.UsageError(
            f"{method.name} with data.labelled = none: expected labelled examples for the server, "
            "of a natural client or a share of the train examples, e.g. 0.1."
        )
    others = {
        f"algorithm.name = {config.algorithm.name}": bool(added),
        f"client.frozen = {config.client.frozen}": config.client.frozen != "none",
        "submodel.tiers": len(config.submodel.tiers) > 0,
        "model.fix_after": config.model.fix_after > 0,
        "data.trains = server": config.data.trains == "server",
        "data.rdn": config.data.rdn,
    }
    for setting, there in others.items():
        if there:
            raise errors.UsageError(
                f"{setting} does not go with {method.name}: it takes local steps of its own, on "
                "whole models, beside the server's examples as they are. Leave it out."
            )


def _check_members(config: Config) -> None:
    """Of groups, clusters and chains, what excludes what."""
    members, cohort, name = members_of(config), config.cohort, config.algorithm.name

    def refuse(setting: str, why: str) -> None:
        raise errors.UsageError(f"{setting} does not go with {name}: {why}")

    if cohort.share and cohort.sampling in ("bernoulli", "once"):
        raise errors.UsageError(
            f"cohort.share = {cohort.share} with cohort.sampling = {cohort.sampling}: give "
            "cohort.size instead."
        )
    if members == "clients":
        return
    kept = config.model.statistics == "own" or method_of(config).name in ("fedbn", "silobn")
    if kept:
        refuse("a part of the model that stays with clients", "the model is handed on whole.")
    if grows(config) and config.server.aggregate == "foolsgold":
        refuse("server.aggregate = foolsgold", "its histories are of groups, which change.")
    if "fedasyncseq" in name.split("+") and cohort.share:
        refuse("cohort.share", "it has as many chains as cohort.size says.")
    if cohort.sampling == "sizes" and members != "clients":
        refuse("cohort.sampling = sizes", "it is of clients by themselves.")


def _check_virtual(config: Config) -> None:
    """What is of whole clients does not go with virtual ones."""
    of_whole = {
        f"data.shift.name = {config.data.shift.name}": config.data.shift.name != "none",
        "data.rdn": config.data.rdn,
        "data.local_test": config.data.local_test > 0,
        "eval.clients": config.eval.clients,
        "cohort.sampling = sizes": config.cohort.sampling == "sizes",
        f"algorithm.name = {config.algorithm.name}": members_of(config) != "clients",
    }
    for name, there in of_whole.items():
        if there:
            raise errors.UsageError(
                f"partition.virtual = {config.partition.virtual} does not go with {name}, which is "
                "of whole clients. Leave one out."
            )


def _check_wire(config: Config) -> None:
    up, down = codec_settings(config, "up"), codec_settings(config, "down")
    for name in up.keys() & down.keys():
        if config.wire[name] is None and up[name].default != down[name].default:
            raise errors.UsageError(
                f"wire.{name} is {up[name].default!r} in {config.wire.up} and "
                f"{down[name].default!r} in {config.wire.down} unless it is set, and both are "
                "used. Set it."
            )
    codec = codec_of(config, "down")
    if config.wire.cache and codec and not codec.changes:
        raise errors.UsageError(
            f"wire.cache = {config.wire.cache} does not go with wire.down = {config.wire.down}: it "
            "sends models, not updates that could be summed. Choose stc, or leave the cache out."
        )
    if config.wire.feedback and config.wire.unbiased is not False and "mask" in (
        config.wire.up, config.wire.down
    ):
        raise errors.UsageError(
            "wire.feedback does not go with a mask that is made unbiased: what is left out would "
            "grow. Set wire.unbiased = False."
        )


def _check_clock(config: Config) -> None:
    """Of simulated time, what excludes what."""
    (method, added), name = methods_of(config), config.algorithm.name
    late = [m.name for m in added if m.name in ("fedasync", "fedbuff")]
    if config.clock.speed != "none" and members_of(config) != "clients":
        raise errors.UsageError(
            f"clock.speed does not go with algorithm.name = {name!r}: its cohorts are of "
            f"{members_of(config)}, and the clock is of clients. Leave it at none."
        )
    if not late:
        return
    if len(late) > 1:
        raise errors.UsageError(f"algorithm.name = {name!r}: choose one of {' and '.join(late)}.")
    if method.make is not METHODS["fedavg"].make:
        raise errors.UsageError(
            f"algorithm.name = {name!r}: {late[0]} counts what clients changed of what they were "
            f"sent, and {method.name} sends something else. Choose fedavg, fedprox, fedavgm, "
            "fedadam, fedadagrad or fedyogi."
        )
    others = {
        "server.aggregate": config.server.aggregate != "mean",
        "privacy.bound": config.privacy.bound != "none",
        "secure.sum": config.secure.sum,
        "wire.down": config.wire.down != "none",
        "wire.up": config.wire.up != "none" and late[0] == "fedasync",
        "submodel.tiers": len(config.submodel.tiers) > 0,
    }
    for setting, there in others.items():
        if there:
            raise errors.UsageError(
                f"{setting} does not go with {late[0]}: it counts on a cohort that starts from one "
                "model. Leave it at its default."
            )


def _check_uploads(config: Config) -> None:
    """Of what is done to uploads, what excludes what."""
    rule, private, secure = config.server.aggregate, config.privacy.bound, config.secure.sum

    def refuse(a: str, b: str, why: str) -> None:
        raise errors.UsageError(f"{a} does not go with {b}: {why}")

    if rule != "mean" and secure:
        refuse(f"server.aggregate = {rule}", "secure.sum", "it looks at every upload, of which the "
               "server sees the sum alone.")
    if rule != "mean" and private != "none":
        refuse(f"server.aggregate = {rule}", f"privacy.bound = {private}", "the noise is that of a "
               "sum.")
    if private == "median" and secure:
        refuse("privacy.bound = median", "secure.sum", "the server needs every upload's norm. "
               "Choose privacy.bound=fixed.")
    if secure and config.wire.up != "none":
        refuse("secure.sum", f"wire.up = {config.wire.up}", "what is masked cannot be made "
               "smaller.")
    if secure and config.submodel.tiers:
        refuse("secure.sum", "submodel.tiers", "masks of different shapes do not cancel.")
    if rule != "mean" and config.submodel.coverage:
        refuse(f"server.aggregate = {rule}", "submodel.coverage", "it divides means.")
    trim, size = config.server.trim, config.cohort.size
    if rule == "trimmed_mean" and not cohort_share(config) and 2 * trim >= size:
        raise errors.UsageError(
            f"server.trim = {trim}: {trim} from each end of {size} clients leaves nothing: "
            f"expected at most {(size - 1) // 2}, or server.aggregate = median."
        )
