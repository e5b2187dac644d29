"""From a config to the pure functions and arrays it describes."""

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from fedjax_flat import data as data_lib
from fedjax_flat import errors, memory, models, parts, plugins, rng, tasks
from fedjax_flat.algorithms import Algorithm
from fedjax_flat.data import Dataset, Examples, FederatedData, HostData, Partition, styles
from fedjax_flat.data import shift as shift_lib
from fedjax_flat.data.labelled import labelled, with_target
from fedjax_flat.data.partition import follow_owners, hold_out, local_split, virtual_clients
from fedjax_flat.engine import client_state, cohort, sampling, selection
from fedjax_flat.engine.clock import Clock, arrivals
from fedjax_flat.engine.evaluate import (
    adapter,
    class_evaluator,
    evaluator,
    in_blocks,
    personal_evaluator,
    searcher,
)
from fedjax_flat.engine.round import (
    Averages,
    CohortOf,
    RoundStep,
    TrainState,
    cohorts,
    init_state,
    local_models,
    round_step,
)
from fedjax_flat.engine.round import models as models_of
from fedjax_flat.experiment import config as config_lib
from fedjax_flat.experiment import features, method, sizes, usage
from fedjax_flat.experiment.by_style import build_clusters, by_nearest
from fedjax_flat.experiment.grouping import Grouping, build_grouping
from fedjax_flat.models import Variables
from fedjax_flat.tasks import Sums, Task

logger = logging.getLogger("fedjax_flat")
CLIENTS_AT_ONCE = 100  # whose examples are brought to the device for an evaluation of all clients


class Network(NamedTuple):
    """A network, and how stored examples become its inputs."""

    preprocess: data_lib.Preprocess
    model: models.Model


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything a training loop needs; `splits` are on the device, and so are `data` if they fit.

    `partition` is who owns which of the data set's train examples; of those, `data` has what
    clients train on, without a validation part.
    """

    config: ml_collections.ConfigDict
    partition: Partition
    data: FederatedData | HostData
    local_test: FederatedData | HostData | None  # the same clients' own test examples
    splits: dict[str, Examples]  # those that are evaluated
    train_examples: Examples
    task: Task
    algorithm: Algorithm
    averages: Averages
    client_state_in: str
    over: cohort.CohortMap
    sample: sampling.Sampler
    cohort_of: CohortOf
    step: RoundStep
    evaluate: Callable[..., Sums]
    predict: Callable[..., jax.Array]  # (variables, a split's examples, positions) -> logits
    evaluate_clients: Callable[..., Sums]  # see engine.evaluate.personal_evaluator
    evaluate_personal: Callable[..., Sums] | None
    evaluate_classes: Callable[..., Any] | None  # see engine.evaluate.class_evaluator
    classes: np.ndarray | None  # (clients, classes): who trains on which, where that is asked
    local_models: Callable[..., Any]  # see engine.round.local_models
    grouping: Grouping | None  # who trains in sequence, or reports to which cluster's server
    features: features.Features | None  # of what, where they are the examples
    network: Network  # of features too: what they are by
    styled: styles.Traffic | None  # what styles weigh, which travel once

    def init(self, variables: Variables | None = None) -> TrainState:
        """The state before the first round; only the seed decides it, unless a model is given."""
        key = jax.random.key(self.config.seed)
        if variables is None:
            variables = jax.jit(self.task.init)(rng.fold(key, "init"))
        return init_state(
            self.algorithm, variables, self.members, key, self.averages,
            self.client_state_in, cosine=self.config.metrics.cosine,
        )

    @property
    def members(self) -> int:
        """How many clients, or groups, cohorts are drawn from; a chain is the only member."""
        kind = usage.members_of(self.config)
        return members_in(kind, self.data.num_clients, self.grouping)

    def data_at(self, round: int) -> FederatedData | HostData:
        """What this round trains on: the clients' data, in this round's groups."""
        if self.grouping is None:
            return self.data
        if usage.members_of(self.config) == "clusters":
            owners = np.empty(self.data.num_clients, np.int32)
            clusters = self.grouping.at(round)
            owners[clusters.indices] = clusters.client_of
            found: dict[str, Any] = {"clusters": owners}
        else:
            found = {"groups": self.grouping.rows(round), "passes": self.config.groups.passes}
        if isinstance(self.data, FederatedData):
            on_device = lambda x: self.over.replicate(jax.device_put(x))
            found |= {n: on_device(x) for n, x in found.items() if isinstance(x, np.ndarray)}
        return dataclasses.replace(self.data, **found)

    @property
    def parts(self) -> dict[str, FederatedData | HostData]:
        """What clients have: their own train examples, and test examples if there are any."""
        return {"own": self.data} | ({"local_test": self.local_test} if self.local_test else {})

    def data_of(self, clients: Sequence[int], part: str = "own") -> FederatedData:
        """Data that have at least these clients' examples, on the device."""
        data = self.parts[part]
        if isinstance(data, FederatedData):
            return data
        return self.over.replicate(data.of(np.asarray(clients, np.int32)))

    def over_clients(
        self, measure: Callable[[FederatedData, jax.Array], Any], part: str = "own"
    ) -> Any:
        """`measure(data, clients)`, stacked over clients, of all of them."""
        count = self.data.num_clients
        on_device = isinstance(self.parts[part], FederatedData)
        block = count if on_device else min(count, CLIENTS_AT_ONCE)
        found = []
        for start in range(0, count, block):
            here = range(start, min(start + block, count))
            chosen = np.full(block, -1, np.int32)  # the last block ends with nobody
            chosen[: len(here)] = here
            place = self.over.replicate(jax.device_put(chosen))
            found.append(measure(self.data_of(here, part), place))
        return jax.tree.map(lambda *parts: np.concatenate(parts)[:count], *found)

    def models(self, state: TrainState) -> dict[str, Variables]:
        """The trained and the averaged models by name."""
        return models_of(self.algorithm, state, self.averages)

    def split(self, name: str) -> Examples:
        """The examples of an evaluated split, or of train."""
        return errors.lookup("split", name, {**self.splits, "train": self.train_examples})


def build(
    config: ml_collections.ConfigDict,
    data_dir: str | os.PathLike | None = None,
    *,
    extractor: Variables | None = None,
) -> Experiment:
    """Validates `config` and builds the experiment it describes.

    Features are by the network as the config starts it, or by a trained one, the `extractor`.
    """
    for file in config.get("imports", ()):
        plugins.load(file)
    config_lib.validate(config)
    source = data_lib.SOURCES.find(config.data.name)
    options = config_lib.options_of(config, "data", source)
    dataset = data_lib.load(config.data.name, data_dir, **options)
    if is_retrieval(config, dataset):
        dataset = tasks.searched(dataset)
    partition = build_partition(config, dataset, data_dir)
    dataset = with_target(dataset, config.data.labelled)
    attacked = config.data.shift.name == "swap_labels"
    shift, normals = None if attacked else build_shift(config, dataset, partition), None
    if config.data.rdn:
        own = divide(config, dataset, partition).train
        normals = data_lib.normals(dataset, own, shift, config.data.rdn_groups)
        shift = normals.tagged(shift)
    network, featured = build_network(config, dataset, normals), None
    if config.data.features:
        dataset, featured = featurise(config, dataset, network, data_dir, extractor)
    shares = divide(config, dataset, partition)
    clock = method.build_clock(config, shares.train.sizes)
    flights = method.build_flights(config, clock)
    task = build_task(config, dataset, network)
    sizes.check(config, task, dataset)
    sizes.check_batches(config, network.model, shares.train)
    judge = fixed = task
    if config.eval.statistics != "model":
        judge = build_task(config, dataset, build_network(config, dataset, normals, by_batch=True))
    if config.model.fix_after:
        fixed = build_task(config, dataset, build_network(config, dataset, normals, frozen=True))
    one = data_lib.whole(jax.tree.map(lambda x: x[:1], dataset.train))
    at_clients = config.data.trains == "clients"
    owners = shares.train if at_clients else clients_of(config, dataset, data_dir)
    clusters = build_clusters(config, dataset, owners, shift)
    algorithm = method.build_algorithm(
        config, task, one, fixed, clusters.number if clusters else 1
    )
    averages = method.build_averages(config)
    classes = local_classes(config, dataset, shares, algorithm)
    pruned = classes if usage.prunes(config) else None
    strategy = "map" if config.debug else config.cohort.strategy  # one client's values at a time
    over = cohort.cohort_map(strategy, chunk=config.cohort.chunk, devices=config.cohort.devices)
    if len(config.submodel.tiers) > 1 and ("vmap" in over.name or "chunked" in over.name):
        logger.warning(
            "cohort: %s runs all %d tiers of sub-models for every client; with cohort.strategy=map "
            "each runs its own only", over.name, len(config.submodel.tiers),
        )
    data = place_data(config.data.placement, dataset.train, shares.train, over, shift, pruned)
    grouping = build_grouping(config, dataset, shares.train, task, data, data_dir)
    if attacked:  # who attacks depends on groups
        groups = grouping.at(0) if grouping and usage.members_of(config) == "groups" else None
        shift = build_shift(config, dataset, partition, groups=groups)
        data = dataclasses.replace(data, shift=shift)
    style, styled = build_style(config, dataset), None
    if style:
        bank = styles.bank(style, dataset, owners, shift)
        styled = styles.traffic(bank, style)
        logger.info(
            "styles: %d of %d bytes, sent once: %d bytes up and %d down in all", bank.size,
            bank.bytes // bank.size, styled.up, styled.down,
        )
        data = dataclasses.replace(data, bank=over.replicate(bank))
    if clusters and clusters.number > 1:
        sizes_of = np.bincount(clusters.of_client)
        logger.info("clusters by style: %s clients", " + ".join(map(str, sizes_of)))
        place = lambda x: over.replicate(jax.device_put(x))
        on_host = isinstance(data, HostData)
        data = dataclasses.replace(
            data, clusters=clusters.of_client if on_host else place(clusters.of_client)
        )
        styled = styles.Traffic(*(styled or (0, 0)))
        styled = styled._replace(up=styled.up + clusters.sent)
    sample = arrivals(flights) if flights else build_sampler(
        config, shares.train, grouping, clock
    )
    cohort_of = cohorts(sample, over)
    kind = usage.members_of(config)
    largest = int(shares.train.sizes.max()) if kind == "clients" else shares.train.indices.size
    members = members_in(kind, shares.train.num_clients, grouping)
    algorithm = method.protect(config, algorithm, cohort_of, largest, members)
    algorithm = method.by_the_clock(config, algorithm, clock, flights, cohort_of)
    method.account(config, members)
    batches = over if over.mesh else cohort.cohort_map("map")
    if shares.unlabelled is not None:
        inputs = jax.tree.map(lambda x: np.asarray(x)[shares.unlabelled], dataset.train.inputs)
        data = dataclasses.replace(data, unlabelled=over.replicate(data_lib.on_device(inputs)))
    if usage.method_of(config).labelled:
        here = labelled(dataset, config.data.labelled)
        own = jax.tree.map(lambda x: np.asarray(x)[here], dataset.train)
        data = dataclasses.replace(data, labelled=over.replicate(data_lib.on_device(own)))
    local_test = None
    if shares.local_test:
        tested, own = shares.local_test
        after = 0 if tested is dataset.train else data_lib.count_of(dataset.train)
        look = shift_lib.evaluated(shift, after)
        local_test = place_data(config.data.placement, tested, own, over, look, pruned)
    seen = shift_lib.seen(shift, dataset, partition)
    if grouping and grouping.test_left is not None:
        left = jax.tree.map(lambda x: np.asarray(x)[grouping.test_left], seen.test)
        seen = dataclasses.replace(seen, test=left)
    splits = build_splits(config, seen, data, shares.validation, over)
    evaluate, predict = build_evaluator(config, task, judge, batches)
    if not task.search:
        evaluate = in_blocks(evaluate, 20 * config.eval.batch_size)
    if clusters and clusters.number > 1:
        evaluate, predict = by_nearest(clusters, dataset, evaluate, predict)
    cosine = config.metrics.cosine
    by_client = lambda whose: jax.jit(
        personal_evaluator(task, whose, config.eval.batch_size, batches)
    )
    return Experiment(
        config=config,
        partition=partition,
        data=data,
        local_test=local_test,
        splits={name: splits[name] for name in config.eval.splits},
        train_examples=splits["train"],
        task=task,
        algorithm=algorithm,
        averages=averages,
        client_state_in=place_client_state(config, task, algorithm, members),
        over=over,
        sample=sample,
        cohort_of=jax.jit(cohort_of),
        step=round_step(
            algorithm, sample, over, averages, task=task, cosine=cosine, chained=kind == "chain"
        ),
        evaluate=evaluate,
        predict=predict,
        evaluate_clients=by_client(None),
        evaluate_personal=by_client(algorithm) if algorithm.personal else None,
        evaluate_classes=jax.jit(
            class_evaluator(task, algorithm, config.eval.batch_size, batches)
        ) if config.eval.absent else None,
        classes=classes,
        local_models=build_local_models(config, task, algorithm, over),
        grouping=grouping,
        features=featured,
        network=network,
        styled=styled,
    )


def members_in(kind: str, clients: int, grouping: Grouping | None) -> int:
    """What cohorts are drawn from: clients, or groups; one chain."""
    if kind == "chain":
        return 1
    return grouping.members if kind == "groups" and grouping else clients


def build_sampler(
    config: ml_collections.ConfigDict, partition: Partition, grouping: Grouping | None,
    clock: Clock | None = None,
) -> sampling.Sampler:
    """Who takes part in a round, of clients or of groups."""
    kind, own = usage.members_of(config), config.cohort
    if grouping and usage.grows(config):
        return sampling.growing(grouping.starts, grouping.counts, usage.cohort_share(config))
    count = grouping.members if grouping and kind == "groups" else partition.num_clients
    size = sampling.share_of(own.share, count) if own.share else own.size
    if kind == "groups" and size > count:
        raise errors.UsageError(
            f"a cohort of {size} from {count} groups: expected at most {count}. Lower cohort.size, "
            "set cohort.share, or make more groups."
        )
    if grouping and kind == "clusters":
        return sampling.stratified(grouping.rows(0), size)
    if own.sampling == "tiers" and clock:
        return selection.tiers(clock, size, tiers=own.tiers)
    if own.sampling == "deadline" and clock:
        return selection.deadline(
            clock, size, candidates=own.candidates, seconds=own.deadline
        )
    if own.sampling == "sizes":
        return sampling.sizes(partition.sizes, size)
    return errors.lookup("cohort sampling", own.sampling, sampling.SAMPLERS)(count, size)


def build_local_models(config, task: Task, algorithm: Algorithm, over) -> Callable[..., Any]:
    """See engine.round.local_models; of clients by themselves, whomever they train with."""
    init = lambda key: algorithm.init(task.init(key), 1)[1]
    if usage.members_of(config) != "clients" and jax.tree.leaves(
        jax.eval_shape(init, jax.random.key(0))
    ):

        def refuse(*arguments):
            raise errors.UsageError(
                f"local models of clients under {config.algorithm.name}: what it keeps is of "
                "groups. Choose a method without client state."
            )

        return refuse
    return jax.jit(local_models(algorithm, over))


def build_evaluator(
    config: ml_collections.ConfigDict, task: Task, judge: Task, batches: cohort.CohortMap
) -> tuple[Callable[[Variables, Examples], Sums], Callable[..., jax.Array]]:
    """(a model's sums on a split, its logits of some examples of a split).

    Statistics are those that `config.eval.statistics` names; `judge` is the task whose network
    normalises by batch, if need be.
    """
    size, of_split = config.eval.batch_size, config.eval.statistics == "split"
    adapt = jax.jit(adapter(judge, size, batches))
    shown = task if of_split else judge
    evaluate = searcher(shown, size) if shown.search else jax.jit(evaluator(shown, size, batches))

    @jax.jit
    def logits(variables, examples):
        mask = jax.numpy.ones(data_lib.count_of(examples), bool)
        stored = data_lib.Batch(examples.inputs, examples.labels, mask)
        batch = shown.prepare(stored, None)
        return shown.forward(variables, batch, None).logits

    def adapted(variables, examples):
        return adapt(variables, examples) if of_split else variables

    def predict(variables, examples, positions):
        some = jax.tree.map(lambda x: x[np.asarray(positions)], examples)
        return logits(adapted(variables, examples), some)

    return lambda variables, examples: evaluate(adapted(variables, examples), examples), predict


class Shares(NamedTuple):
    """What becomes of the clients' examples."""

    train: Partition
    validation: np.ndarray | None  # held out: positions in the train examples
    local_test: tuple[Examples, Partition] | None  # the same clients' own test examples
    unlabelled: np.ndarray | None  # the server's: positions in the train examples


def is_retrieval(config: ml_collections.ConfigDict, dataset: Dataset) -> bool:
    """Whether images are searched."""
    return task_name(config, dataset) == "retrieval"


def outputs_of(config: ml_collections.ConfigDict, dataset: Dataset) -> int:
    """How many numbers a network says: one for each class, or an embedding."""
    if is_retrieval(config, dataset):
        return config.task.dimensions
    return dataset.num_classes or 1


def task_name(config: ml_collections.ConfigDict, dataset: Dataset) -> str:
    """What is learned: as the config says, or what the data are for."""
    return dataset.task if config.task.name == "auto" else config.task.name


def divide(config: ml_collections.ConfigDict, dataset: Dataset, partition: Partition) -> Shares:
    """Each client's part to train on, to validate and to test on."""
    local_test = None
    if config.data.local_test:
        closed = dataset.train.labels if config.data.closed else None
        partition, test = local_split(partition, config.data.local_test, closed=closed)
        local_test = dataset.train, test
    elif config.partition.name == "natural" and dataset.test_owners is not None:
        test = follow_owners(partition, dataset.owners, dataset.test_owners)
        local_test = dataset.test, test
    unlabelled = validation = None
    if config.data.unlabelled:
        partition, unlabelled = hold_out(
            partition, config.data.unlabelled, source="server", setting="data.unlabelled"
        )
    if config.data.validation:
        partition, validation = hold_out(
            partition, config.data.validation, source=config.data.validation_from
        )
    if config.partition.virtual:  # whose local tests would be those of whole clients
        partition = virtual_clients(partition, config.partition.virtual)
        local_test = None
    return Shares(partition, validation, local_test, unlabelled)


def build_task(config: ml_collections.ConfigDict, dataset: Dataset, network: Network) -> Task:
    """What is learned by the network or, of features, by a classifier alone."""
    name = task_name(config, dataset)
    found = tasks.TASKS.find(name)
    options = config_lib.options_of(config, "task", found)
    if name in ("classification", "segmentation"):
        data_lib.check_labels(dataset, options.get("ignored"))
    if name == "retrieval" and np.ndim(dataset.train.labels) == 1:
        for setting in ("radius", "negative_radius"):
            if config.task[setting] != found.settings[setting].default:
                raise errors.UsageError(
                    f"config.task.{setting} = {config.task[setting]} would change nothing: labels "
                    f"of {dataset.name} are identities, not positions. Leave it out."
                )
    if config.data.features:
        preprocess = data_lib.preprocess(dataset, mixup=config.data.mixup)
        model = models.build(
            "linear", num_classes=outputs_of(config, dataset), inputs=preprocess.inputs
        )
    else:
        preprocess, model = network
    if count := usage.random_features(config):
        random = config.model.random
        model = models.with_random_features(model, count, sigma=random.sigma, law=random.law)
    return found.make(method.network_of(config, model), preprocess, dataset, **options)


def build_network(
    config: ml_collections.ConfigDict, dataset: Dataset, normals: data_lib.Normals | None = None,
    *, by_batch: bool = False, frozen: bool = False,
) -> Network:
    """The network that `config.model` names; see `models.from_linen` for the options."""
    preprocess = data_lib.preprocess(
        dataset,
        mean=config.data.mean,
        std=config.data.std,
        crop_padding=config.data.crop_padding,
        resized_crop=config.data.resized_crop,
        rotation=config.data.rotation,
        flip=config.data.flip,
        cutout=config.data.cutout,
        mixup=config.data.mixup,
        jitter=config.data.jitter,
        scale=config.data.scale,
        crop=config.data.crop,
        ignored=config.task.ignored,
        normals=normals,
        style=build_style(config, dataset),
    )
    network = config_lib.options_of(config, "model", models.MODELS.find(config.model.name))
    model = models.build(
        config.model.name,
        num_classes=outputs_of(config, dataset),
        inputs=preprocess.inputs,
        precision=config.model.precision,
        frozen_stats=(
            frozen or config.model.statistics == "frozen" or config.client.frozen == "features"
        ),
        by_batch=by_batch,
        **network,
    )
    stats = jax.eval_shape(model.init, jax.random.key(0)).stats
    for name in ("model.statistics", "model.fix_after", "eval.statistics"):
        section, last = name.split(".")
        value = config[section][last]
        if value != config_lib.SETTINGS[name].default and not jax.tree.leaves(stats):
            raise errors.UsageError(
                f"config.{name} = {value!r} would change nothing: model {config.model.name} has no "
                "statistics."
            )
    return Network(preprocess, model)


def featurise(
    config: ml_collections.ConfigDict, dataset: Dataset, network: Network, data_dir,
    extractor: Variables | None,
) -> tuple[Dataset, features.Features]:
    """The features that the network has of the examples, as it starts or with other weights."""
    key = rng.fold(jax.random.key(config.seed), "init")
    options = config_lib.options_of(config, "model", models.MODELS.find(config.model.name))
    how = (
        config.model.name, sorted(options.items()), config.model.precision, dataset.max_value,
        config.data.mean or dataset.mean, config.data.std or dataset.std, config.data.resized_crop,
    )
    variables = jax.jit(network.model.init)(key)
    if extractor is not None:
        variables = parts.put(variables, features.extractor_of(extractor))
    return features.replace(
        dataset, *network, variables, how=how, data_dir=data_dir,
        batch_size=config.eval.batch_size,
    )


def build_splits(
    config: ml_collections.ConfigDict, dataset: Dataset, data: FederatedData | HostData, held_out,
    over,
) -> dict[str, Examples]:
    """The examples of every split that is looked at; with host data, train is on the host too."""
    place = lambda examples: over.replicate(data_lib.on_device(examples))
    of_train = lambda index: jax.tree.map(lambda x: np.asarray(x)[index], dataset.train)
    shifted = data.shift is not None and data.shift.evaluated
    make: dict[str, Callable[[], Examples]] = {
        "train": lambda: place(dataset.train) if shifted else data.examples,
        "test": lambda: place(dataset.test),
    }
    for part in dataset.parts:
        make[part] = functools.partial(lambda part: place(dataset.split(part)), part)
    if held_out is not None:
        rest = np.setdiff1d(np.arange(data_lib.count_of(dataset.train)), held_out)
        make |= {
            "train": lambda: place(of_train(rest)), "validation": lambda: place(of_train(held_out))
        }
    elif "validation" in config.eval.splits:
        raise errors.UsageError(
            "split validation: there is none. Hold a share of the train examples out with "
            "config.data.validation, e.g. 0.1."
        )
    return {name: errors.lookup("split", name, make)() for name in {"train", *config.eval.splits}}


def local_classes(
    config: ml_collections.ConfigDict, dataset: Dataset, shares: Shares, algorithm: Algorithm
) -> np.ndarray | None:
    """Which classes each client trains on, where heads are pruned to them or tests ask."""
    if config.eval.absent and not algorithm.personal:
        raise errors.UsageError(
            f"config.eval.absent = {config.eval.absent} would change nothing: clients have no "
            f"models of their own under {config.algorithm.name}. Leave it out."
        )
    if not (config.eval.absent or usage.prunes(config)):
        return None
    count = lambda examples, partition: data_lib.class_counts(
        partition, np.asarray(examples.labels), dataset.num_classes
    )
    has = count(dataset.train, shares.train) > 0
    if not usage.prunes(config):
        return has
    if (empty := np.flatnonzero(~has.any(axis=1))).size:
        raise errors.UsageError(
            f"oll: client {empty[0]} has no examples to train on, so no labels to which its head "
            f"could be pruned ({empty.size} such clients). Leave them out, e.g. with "
            "partition.min_size."
        )
    if shares.local_test:
        outside = np.argwhere((count(*shares.local_test) > 0) & ~has)
        if outside.size:
            client, label = outside[0]
            raise errors.UsageError(
                f"oll: client {client} is tested on class {label}, which it does not train on "
                f"({len(outside)} such classes of {len(np.unique(outside[:, 0]))} clients): its "
                "pruned head can never be right there. Expected tests of classes that are trained "
                "on: data.closed=True."
            )
    return has


def place_data(
    placement: str, examples: Examples, partition: Partition, over, shift, classes=None
) -> Any:
    """Clients' examples on the device if they fit, or a cohort at a time from the host."""
    if placement == "auto":
        placement = "device" if memory.fits(examples) else "host"
    if placement == "device":
        return over.replicate(
            data_lib.federate(examples, partition, shift=shift, classes=classes)
        )
    return HostData(examples, partition, shift=shift, classes=classes)


def build_shift(
    config: ml_collections.ConfigDict, dataset: Dataset, partition: Partition, **more: Any
) -> data_lib.Shift | None:
    """How each of the partition's clients sees its examples; None is as they are."""
    found = data_lib.SHIFTS.find(config.data.shift.name)
    options = config_lib.options_of(config, "data.shift", found)
    shift = found.make(dataset, partition.num_clients, **options, **more)
    if not isinstance(shift, data_lib.Shift | None):
        raise errors.UsageError(
            f"data.shift {config.data.shift.name} returns {type(shift).__name__}: expected "
            "fedjax_flat.data.Shift, or None."
        )
    return shift


def build_style(config: ml_collections.ConfigDict, dataset: Dataset) -> styles.Style | None:
    """How train images are restyled, if they are."""
    found = data_lib.STYLES.find(config.data.style.name)
    return found.make(dataset, **config_lib.options_of(config, "data.style", found))


def clients_of(
    config: ml_collections.ConfigDict, dataset: Dataset, data_dir: Any = None
) -> Partition:
    """The clients, whose styles the server has, where the server trains."""
    config = config.copy_and_resolve_references()
    config.data.trains = "clients"
    return build_partition(config, dataset, data_dir)


def place_client_state(config, task: Task, algorithm: Algorithm, clients: int) -> str:
    """Where the clients' state is kept: what `config.cohort.client_state` says, if it fits."""
    init = lambda key: algorithm.init(task.init(key), clients)[1]
    row = jax.eval_shape(init, jax.random.key(0))
    if usage.grows(config) and jax.tree.leaves(row):
        raise errors.UsageError(
            f"algorithm.name = {config.algorithm.name!r}: what the method keeps is of groups, and "
            "those of fedseq2par change. Choose one without client state, e.g. fedprox+fedseq2par."
        )
    return client_state.choose(config.cohort.client_state, row, clients, memory.free())


def build_partition(
    config: ml_collections.ConfigDict, dataset: Dataset, data_dir=None
) -> Partition:
    """The clients that `config.partition` describes, with what `config.data` leaves them."""
    found = data_lib.PARTITIONS.find(config.partition.name)
    options = config_lib.options_of(config, "partition", found)
    partition = found.make(dataset, data_dir, **options)
    if not isinstance(partition, Partition):
        raise errors.UsageError(
            f"partition {config.partition.name} returns {type(partition).__name__}: expected "
            "fedjax_flat.data.Partition.of(index lists)."
        )
    partition.check(data_lib.count_of(dataset.train))
    if config.data.labelled != "none":
        own = labelled(dataset, config.data.labelled)
        if config.data.trains == "server":
            return Partition.of([own])
        others = np.setdiff1d(np.arange(data_lib.count_of(dataset.train)), own)
        partition = data_lib.restrict(partition, others)
        partition = partition.only(partition.sizes > 0)
    if config.data.imbalance != "none":
        kept = data_lib.imbalance(dataset.train.labels, config.data.imbalance, config.seed)
        partition = data_lib.restrict(partition, kept)
    if config.data.local_test:
        enough = partition.sizes >= 2
        if not enough.all():
            logger.info("%d clients with fewer than 2 examples are left out", (~enough).sum())
        partition = partition.only(enough)
    if is_retrieval(config, dataset):
        partition = with_pairs(config, dataset, partition)
    return partition


def with_pairs(
    config: ml_collections.ConfigDict, dataset: Dataset, partition: Partition
) -> Partition:
    """The clients that have two images of one place; the others, which learn nothing, are named."""
    relation = tasks.relation_of(config.task.radius, config.task.negative_radius)
    labels = np.asarray(dataset.train.labels)
    own = np.split(partition.indices, partition.offsets[1:-1])
    has = np.array([bool(relation.paired(labels[index]).any()) for index in own])
    if has.all():
        return partition
    names = data_lib.names_of(dataset, partition)
    lost = [names[k] for k in np.flatnonzero(~has)]
    listed = ", ".join(lost[:5]) + (", ..." if len(lost) > 5 else "")
    where = "" if labels.ndim == 1 else f" within task.radius = {relation.radius:g} m"
    if not has.any():
        raise errors.UsageError(
            f"no client has two images of one place{where} ({listed}), so none can learn: expected "
            "clients with positive pairs. Choose another partition" + (
                "." if labels.ndim == 1 else ", or a larger radius."
            )
        )
    logger.warning(
        "%d of %d clients have no two images of one place%s and are left out: %s",
        len(lost), len(has), where, listed,
    )
    return partition.only(has)
