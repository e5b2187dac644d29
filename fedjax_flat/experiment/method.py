"""The method of a config: what clients do, what the server does, what travels."""

import functools
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from fedjax_flat import errors, parts, server
from fedjax_flat.algorithms import (
    Algorithm,
    Method,
    Parts,
    added,
    compressed,
    foolsgold,
    personal,
    private,
    robust,
    secure,
    submodels,
    without_traffic,
)
from fedjax_flat.algorithms.asynchronous import Flights, asynchronous, discount
from fedjax_flat.algorithms.poisoned import chosen, poisoned
from fedjax_flat.algorithms.private import epsilon
from fedjax_flat.algorithms.timed import timed
from fedjax_flat.client import asam, fixed_after, local_training, sam, sgd, warm_up
from fedjax_flat.client.optimizer import named
from fedjax_flat.data import ClientData
from fedjax_flat.engine import clock as clock_lib
from fedjax_flat.engine import selection
from fedjax_flat.engine.round import Averages, CohortOf
from fedjax_flat.experiment import usage
from fedjax_flat.models import Model
from fedjax_flat.tasks import Task
from fedjax_flat.wire import Codec, feedback

logger = logging.getLogger("fedjax_flat")


def network_of(config: ml_collections.ConfigDict, model: Model) -> Model:
    """The model, or what the config's method trains and tests in its place."""
    method = usage.method_of(config)
    return method.network(model, _settings_of(config, method)) if method.network else model


def _settings_of(config: ml_collections.ConfigDict, method: Method) -> dict[str, Any]:
    return {name: config.algorithm[method.section][name] for name in method.settings}


def build_algorithm(
    config: ml_collections.ConfigDict, task: Task, data: ClientData | None = None,
    fixed: Task | None = None, clusters: int = 1,
) -> Algorithm:
    """The method that `config.algorithm` names, of the parts that the rest of it describes.

    `data` shows what a client's data look like, for codecs that keep something of uploads; `fixed`
    is the task with statistics that do not move.
    """
    (method, additions), client = usage.methods_of(config), config.client
    frozen = parts.named(client.frozen)
    worker = local_training(
        task,
        build_client_optimizer(config),
        sharpness=build_sharpness(config, build_rho(client)),
        batch_size=client.batch_size,
        epochs=client.epochs,
        steps=client.steps or None,
        frozen=frozen,
        drop_last=client.drop_last,
    )
    if config.model.fix_after:
        assert fixed
        worker = fixed_after(worker, fixed, config.model.fix_after)
    settings_of = functools.partial(_settings_of, config)

    def make(worker):
        assert method.make  # of the one that others are added to
        return method.make(Parts(
            worker, build_server_optimizer(config), build_rate(config), build_rho(client),
            functools.partial(build_sharpness, config), config.algorithm.weighting,
            settings_of(method), config, clusters,
        ))

    algorithm = added(make, worker, *(m.add(settings_of(m)) for m in additions if m.add))
    algorithm = without_traffic(algorithm, frozen)
    if config.model.statistics in ("own", "layers"):
        layers = config.model.statistics == "layers"
        algorithm = personal(algorithm, parts.normalisation if layers else parts.statistics)
    _warn_of_statistics(config, algorithm, task)
    up, down = build_codecs(config)
    tiers = config.submodel.tiers
    if up or (down and not tiers):
        algorithm = compressed(
            algorithm, up=up, down=None if tiers else down, data=data, cache=config.wire.cache,
            seed=config.seed,
        )
    return submodels(algorithm, task, down=down, **config.submodel) if tiers else algorithm


def _warn_of_statistics(
    config: ml_collections.ConfigDict, algorithm: Algorithm, task: Task
) -> None:
    """Where statistics stay with clients, the global model has none worth evaluating."""
    names = parts.take(jax.eval_shape(task.init, jax.random.key(0)), parts.statistics)
    stays = any(part.own and part.own(name) for part in algorithm.exchanges for name in names)
    if stays and config.eval.statistics == "model":
        logger.warning(
            "statistics stay with the clients, so that the global model is evaluated with those "
            "that it started with. --config.eval.statistics=split takes the test data's; personal "
            "models have their own."
        )


def build_codecs(config: ml_collections.ConfigDict) -> tuple[Codec | None, Codec | None]:
    """What `config.wire` names, up and down, with what each keeps."""
    up, down = (usage.codec_of(config, way) for way in ("up", "down"))
    if config.wire.feedback:
        up = up and feedback(up)
        down = down and feedback(down)
    return up, down


def protect(
    config: ml_collections.ConfigDict, algorithm: Algorithm, cohort_of: CohortOf, largest: int,
    count: int,
) -> Algorithm:
    """`algorithm` with what `config` wants done to uploads, by attackers, clients and server.

    `cohort_of(key, round)` is who takes part, of `count` members, `largest` the most examples
    that one of them has.
    """
    rule, privacy = config.server.aggregate, config.privacy
    if config.attack.share:
        bad = chosen(count, config.attack.share, config.attack.seed)
        algorithm = poisoned(algorithm, bad, config.attack.factor)
    if rule == "foolsgold":
        return foolsgold(algorithm, **config.server.foolsgold)
    if rule != "mean":
        return robust(algorithm, trim=config.server.trim if rule == "trimmed_mean" else None)
    if privacy.bound != "none":
        algorithm = private(
            algorithm,
            clip=privacy.clip if privacy.bound == "fixed" else None,
            noise=privacy.noise,
            seed=config.seed,
            expected=config.cohort.size if config.cohort.sampling == "bernoulli" else None,
        )
    if not config.secure.sum:
        return algorithm

    def members(round):
        clients, mask = cohort_of(jax.random.key(config.seed), round)
        return clients if mask is None else jnp.where(mask, clients, -1)

    alike = privacy.bound != "none" or config.algorithm.weighting == "uniform"
    options = {name: value for name, value in config.secure.items() if name != "sum"}
    return secure(
        algorithm, members, largest=1 if alike else largest, seed=config.seed, **options
    )


def build_clock(
    config: ml_collections.ConfigDict, sizes: np.ndarray
) -> clock_lib.Clock | None:
    """The clock of clients with so many examples, if there is one."""
    if config.clock.speed == "none":
        needs = {
            f"algorithm.name = {config.algorithm.name!r}": usage.asynchronous_of(config),
            f"cohort.sampling = {config.cohort.sampling!r}":
                config.cohort.sampling in selection.SELECTIONS,
        }
        for setting, needed in needs.items():
            if needed:
                raise errors.UsageError(
                    f"{setting} needs a clock: set clock.speed to a law of seconds per example, "
                    "e.g. lognormal(0.01, 0.5)."
                )
        return None
    speed, delay = (clock_lib.law(f"clock.{n}", config.clock[n]) for n in ("speed", "delay"))
    client = config.client
    steps = client.steps * client.batch_size * (sizes > 0)
    examples = steps if client.steps else client.epochs * sizes
    return clock_lib.clock(speed, delay, examples, config.seed)


def build_flights(
    config: ml_collections.ConfigDict, clock: clock_lib.Clock | None
) -> Flights | None:
    """Who comes back when, if clients are not waited for."""
    late = usage.asynchronous_of(config)
    if not late:
        return None
    assert clock
    return clock_lib.flights(
        clock, slots=config.algorithm[late.section].in_flight, arrivals=config.cohort.size,
        rounds=config.rounds,
    )


def by_the_clock(
    config: ml_collections.ConfigDict, algorithm: Algorithm, clock: clock_lib.Clock | None,
    flights: Flights | None, cohort_of: CohortOf,
) -> Algorithm:
    """`algorithm` in simulated time, if there is a clock."""
    if flights:
        late = usage.asynchronous_of(config)
        assert late
        own = config.algorithm[late.section]
        s = discount(own.staleness, own.a, own.b)
        return asynchronous(algorithm, flights, s, alpha=own.get("alpha"))
    if not clock:
        return algorithm

    def seconds(round):
        clients, mask = cohort_of(jax.random.key(config.seed), round)
        taken = clock.duration(round, clients)
        return taken if mask is None else jnp.where(mask, taken, 0.0)

    return timed(algorithm, seconds)


def build_client_optimizer(config: ml_collections.ConfigDict):
    """The optimiser of `config.client`."""
    client, rate = config.client, build_rate(config)
    shared = {"weight_decay": client.weight_decay, "clip": client.clip}
    if client.optimizer == "sgd":
        return sgd(rate, momentum=client.momentum, nesterov=client.nesterov, **shared)
    return named(client.optimizer, rate, client.options, **shared)


def build_rate(config: ml_collections.ConfigDict):
    """The client learning rate: a number, or a function of the round."""
    rate, factors = config.client.learning_rate, []
    if config.client.learning_rate_decay != 1:
        decay = jnp.float32(config.client.learning_rate_decay)
        factors.append(lambda t: decay ** t.astype(jnp.float32))
    if "swa" in usage.averages(config):
        swa = config.server.swa
        start = usage.swa_start(config)
        factors.append(server.swa_cycle(start, swa.cycle, swa.rate_ratio, capture=swa.capture))
    return (lambda t: rate * math.prod(f(t) for f in factors)) if factors else rate


def build_rho(config: ml_collections.ConfigDict):
    """The clients' radius: a number, or a function of the round while it warms up."""
    if config.rho_warmup:
        return warm_up(config.rho_start, config.rho, config.rho_warmup)
    return config.rho


def build_sharpness(config: ml_collections.ConfigDict, rho):
    """The clients' ascent of radius `rho`, or None; a method that is named for SAM has SAM."""
    client = config.client
    make = {
        "none": lambda: None,
        "sam": lambda: sam(rho),
        "asam": lambda: asam(rho, client.eta, scale=client.asam_scale),
    }
    return make[usage.sharpness_of(config)]()


def build_averages(config: ml_collections.ConfigDict) -> Averages:
    """The models that are averaged beside the trained one."""
    swa, wima = config.server.swa, config.server.wima

    def make_swa():
        start = usage.swa_start(config)
        average = server.swa(start, swa.cycle, capture=swa.capture)
        if average.first > config.rounds:
            raise errors.UsageError(
                f"SWA would average its first model in round {average.first} (server.swa.start = "
                f"{swa.start:g}, cycle = {swa.cycle}), after the last of {config.rounds} rounds. "
                "Start earlier, shorten the cycle, or raise rounds."
            )
        return average

    make = {"swa": make_swa, "wima": lambda: server.wima(wima.window, parameters=wima.parameters)}
    names = [n for n in usage.averages(config) if n != "swa" or swa.averaging]
    return {name: make[name]() for name in names}


def build_server_optimizer(config: ml_collections.ConfigDict):
    """The server optimiser: the method's, if it is named for one, else `config.server`'s."""
    kind = usage.server_optimizer_of(config)
    if kind in server.ADAPTIVE:
        return server.adaptive(kind, **config.server.adaptive)
    return server.sgd(config.server.learning_rate, usage.server_momentum(config))


def account(config: ml_collections.ConfigDict, clients: int) -> None:
    """Says how private all rounds together are, if `privacy.delta` asks for it."""
    privacy = config.privacy
    if privacy.bound == "none" or not privacy.delta:
        return
    spent = epsilon(
        noise=privacy.noise, clients=clients, cohort=config.cohort.size, rounds=config.rounds,
        delta=privacy.delta, sampling=config.cohort.sampling,
    )
    logger.info(
        "privacy: epsilon = %.3g at delta = %g after %d rounds, for one client %s", spent,
        privacy.delta, config.rounds,
        "more or less" if config.cohort.sampling == "bernoulli" else "in place of another",
    )
