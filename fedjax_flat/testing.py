"""Checks that every method of ours passes, for users' own methods too.

    from fedjax_flat import testing

    def test_mine():
        testing.check_method("mine", {"algorithm.mine.strength": 0.5}, reference=mine_in_numpy)

`check_method` trains a small, hard problem: clients of unequal sizes, one of them empty, partial
cohorts, ragged batches. It raises an AssertionError that says what does not hold. Each check can be
called by itself with a `Run`. They hold under strict promotion of types and ranks, which a test
suite turns on itself (`jax_numpy_dtype_promotion`, `jax_numpy_rank_promotion`).
"""

import copy
import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_flat import data as data_lib
from fedjax_flat import experiment, models, rng, tasks
from fedjax_flat.algorithms import Algorithm
from fedjax_flat.data.federated import shuffled_positions
from fedjax_flat.engine import cohort as cohort_lib
from fedjax_flat.engine import round as round_lib
from fedjax_flat.engine import sampling
from fedjax_flat.experiment import config as config_lib
from fedjax_flat.experiment.method import build_algorithm, network_of
from fedjax_flat.run.checkpoint import Checkpoints

SIZES, COHORT, EPOCHS, BATCH, RATE, ROUNDS = (7, 3, 0, 12, 1, 9, 5), 4, 2, 4, 0.1, 5


def blobs(num_examples: int, seed: int = 0) -> data_lib.Dataset:
    """Three classes of noisy 4x4 images."""
    random = np.random.default_rng(seed)
    centres = random.uniform(60, 190, (3, 4, 4, 1))
    labels = random.integers(0, 3, num_examples).astype(np.int32)
    images = np.clip(centres[labels] + random.normal(0, 30, (num_examples, 4, 4, 1)), 0, 255)
    examples = data_lib.Examples(images.astype(np.uint8), labels)
    return data_lib.Dataset("blobs", examples, examples, 3, 255.0, (0.5,), (0.25,))


def partition_of(sizes: Sequence[int]) -> data_lib.Partition:
    """Clients of the given sizes, in the order of the examples."""
    ends = np.cumsum(sizes)
    lists = [np.arange(e - n, e) for n, e in zip(sizes, ends, strict=True)]
    return data_lib.Partition.of(lists)


class Problem:
    """Three classes of small images, shared by clients of given sizes, and an MLP."""

    def __init__(
        self,
        sizes: Sequence[int] = SIZES,
        *,
        hidden: Sequence[int] = (5,),
        seed: int = 0,
        norm: str = "none",
        frozen_stats: bool = False,
    ):
        self.dataset = blobs(max(sum(sizes), 1), seed)
        self.partition = partition_of(sizes)
        self.data = data_lib.federate(self.dataset.train, self.partition)
        module = models.MLP(num_classes=3, hidden=hidden, norm=norm)
        self.seed = seed
        self.train_on(models.from_linen(
            module, self.dataset.input_shape, frozen_stats=frozen_stats
        ))

    def train_on(self, model: models.Model) -> None:
        """Another network, and where its training starts."""
        self.model = model
        self.task = tasks.classification(model, data_lib.preprocess(self.dataset))
        self.variables = jax.jit(model.init)(jax.random.key(self.seed + 100))

    @property
    def params(self) -> Any:
        """The parameters with which training starts."""
        return self.variables.params


def algorithm_of(
    name: str,
    task: tasks.Task,
    settings: Mapping[str, Any] = {},
    data: data_lib.FederatedData | None = None,
) -> Algorithm:
    """A registered method, from a config with these settings; a task of the caller's.

    `data` tell the shapes of what clients send, which codecs with residuals need.
    """
    config = _config_of(name, settings)
    experiment.validate(config)
    return build_algorithm(config, task, None if data is None else data.client(jnp.int32(0)))


def _config_of(name: str, settings: Mapping[str, Any]) -> Any:
    usual = {"client.learning_rate": RATE, "client.batch_size": BATCH, "client.epochs": EPOCHS}
    chosen = {"algorithm.name": name, **settings}
    matter = config_lib.used(config_lib.from_flat(usual | chosen))
    return config_lib.from_flat({n: v for n, v in usual.items() if n in matter} | chosen)


class Run:
    """An algorithm on a problem: its jitted step, and the states after each round."""

    def __init__(
        self,
        algorithm: Algorithm,
        problem: Problem,
        *,
        cohort: int | None = None,
        strategy: str = "map",
        rounds: int = ROUNDS,
        seed: int = 0,
        sampler: sampling.Sampler | None = None,
        cosine: bool = False,
    ):
        self.algorithm, self.problem, self.seed, self.cosine = algorithm, problem, seed, cosine
        self.data = problem.data
        clients = problem.data.num_clients
        self.sample = sampler or sampling.uniform(clients, cohort or min(COHORT, clients))
        over = cohort_lib.cohort_map(strategy, chunk=2)
        self.step = jax.jit(round_lib.round_step(
            algorithm, self.sample, over, task=problem.task, cosine=cosine
        ))
        self.states, self.infos = [self.start(problem.variables)], []
        for _ in range(rounds):
            state, info = self.step(self.states[-1], self.data)
            self.states.append(state)
            self.infos.append(info)

    def start(self, variables: models.Variables) -> round_lib.TrainState:
        """The state before the first round."""
        return round_lib.init_state(
            self.algorithm, variables, self.data.num_clients, jax.random.key(self.seed),
            cosine=self.cosine,
        )

    @property
    def model(self) -> models.Variables:
        """The global model after the last round."""
        return self.algorithm.models(self.states[-1].server)["global"]


class Drawn(NamedTuple):
    """What a plain reference needs: inputs and labels, who owns what, and every draw made.

    `rounds` is a list of {client: batches}, a batch an array of example numbers; `params` are the
    parameters at the start. All in NumPy, float64.
    """

    x: np.ndarray
    y: np.ndarray
    members: list[np.ndarray]
    rounds: list[dict[int, list[np.ndarray]]]
    params: Any
    rate: float


def drawn(
    problem: Problem, *, rounds: int = ROUNDS, cohort: int = COHORT, batch_size: int = BATCH,
    epochs: int = EPOCHS, seed: int = 0,
) -> Drawn:
    """The cohorts and batches that the engine draws for a run of this seed."""
    key = jax.random.key(seed)
    sample = sampling.uniform(problem.data.num_clients, cohort)
    length = -(-problem.data.max_size // batch_size) * batch_size
    chosen = []
    for t in range(rounds):
        members = {}
        for k in np.asarray(sample(rng.fold(key, "cohort", t)).clients).tolist():
            client_key = rng.fold(key, "client", t, k)
            own = problem.partition.client(k)
            batches = []
            for e in range(epochs):
                shuffle_key = rng.fold(client_key, "shuffle", e)
                order = np.asarray(shuffled_positions(shuffle_key, len(own), length))[: len(own)]
                batches += [own[order[i : i + batch_size]]
                            for i in range(0, len(own), batch_size)]
            members[k] = batches
        chosen.append(members)
    images, labels = map(np.asarray, problem.dataset.train)
    x = (images.astype(float).reshape(len(labels), -1) / 255 - 0.5) / 0.25
    owned = [problem.partition.client(k) for k in range(problem.partition.num_clients)]
    params = jax.tree.map(lambda w: np.asarray(w, float), problem.params)
    return Drawn(x, labels, owned, chosen, params, RATE)


def check_method(
    name: str,
    settings: Mapping[str, Any] = {},
    *,
    reference: Callable[[Drawn], Any] | None = None,
    tolerance: float = 2e-5,
    problem: Problem | None = None,
) -> None:
    """All checks of a registered method; `reference(drawn)` has the parameters it must reach.

    A method with a network of its own has it in place of the problem's, and begins as that does.
    """
    problem = copy.copy(problem or Problem())
    names = tuple(problem.params)
    model = network_of(_config_of(name, settings), problem.model)
    if model is not problem.model:
        problem.train_on(model)
    run = Run(algorithm_of(name, problem.task, settings, problem.data), problem)
    check_resume(run)
    check_members(run)
    check_padding(run)
    check_strategies(run)
    check_still(run, names)
    if reference is not None:
        check_reference(run, reference(drawn(problem)), tolerance)


def check_reference(run: Run, expected: Any, tolerance: float = 2e-5) -> None:
    """The global model's parameters are those of a reference, relative to the largest of them."""
    ours = jax.tree.map(lambda w: np.asarray(w, float), run.model.params)
    chex.assert_trees_all_equal_shapes(ours, expected)
    largest = max(np.abs(w).max() for w in jax.tree.leaves(expected))
    scaled = lambda tree: jax.tree.map(lambda w: w / largest, tree)
    chex.assert_trees_all_close(scaled(ours), scaled(expected), rtol=0, atol=tolerance)


def check_resume(run: Run) -> None:
    """The same bits again, and after a checkpoint in between."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(folder)
        checkpoints.save(2, run.states[2])
        restored = checkpoints.restore(run.start(run.problem.variables))
        checkpoints.close()
    assert restored is not None
    state = restored[1]
    for _ in run.infos[2:]:
        state, _ = run.step(state, run.data)
    assert_same_bits(state, run.states[-1])


def check_members(run: Run) -> None:
    """Only the sampled clients that have examples change their state."""
    if not jax.tree.leaves(run.states[0].clients):
        return
    sizes = run.problem.partition.sizes
    for t, (before, after) in enumerate(zip(run.states, run.states[1:], strict=False)):
        members = sampling.draw(run.sample, jax.random.key(run.seed), jnp.int32(t)).clients
        expected = {k for k in np.asarray(members).tolist() if sizes[k]}
        changed = {k for k in range(len(sizes)) if _differ(before.clients, after.clients, k)}
        assert changed == expected, f"round {t}: clients {changed} changed, sampled {expected}"


def check_padding(run: Run) -> None:
    """More room for examples and steps, and empty slots in the cohort, change no bit."""
    data = run.data.replace(equal_sizes=False)
    cohort = sampling.draw(run.sample, jax.random.key(run.seed), jnp.int32(0)).clients

    @functools.partial(jax.jit, static_argnames="slots")
    def once(state, data, slots):
        padded = jnp.pad(cohort, (0, slots))
        mask = jnp.arange(padded.shape[0]) < cohort.shape[0]
        step = round_lib.round_step(
            run.algorithm, lambda key: sampling.Cohort(padded, mask),
            cohort_lib.cohort_map("map"), task=run.problem.task, cosine=run.cosine,
        )
        return step(state, data)[0]

    plain = once(run.states[1], data, slots=0)
    roomy = once(run.states[1], data.replace(max_size=data.max_size + 5), slots=2)
    assert_same_bits(plain, roomy)


def check_strategies(run: Run, tolerance: float = 2e-6) -> None:
    """`vmap` over the cohort reaches the numbers of `map`."""
    rounds = min(2, len(run.infos))
    other = Run(
        run.algorithm, run.problem, strategy="vmap", rounds=rounds, seed=run.seed,
        sampler=run.sample, cosine=run.cosine,
    )
    for a, b in zip(other.states[rounds][2:4], run.states[rounds][2:4], strict=True):
        assert_close(a, b, tolerance)


def check_still(run: Run, names: Sequence[str] = ()) -> None:
    """Finite, and where it was, where the gradient is zero: a classifier that is sure and right.

    Only modules of these `names`, if there are some: others have losses of their own.
    """
    zero = optax.tree.zeros_like(run.problem.params)
    zero["classifier"]["bias"] = zero["classifier"]["bias"].at[0].set(200.0)
    examples = run.data.examples
    data = run.data.replace(
        examples=examples._replace(labels=jnp.zeros_like(examples.labels))
    )
    state = run.start(run.problem.variables._replace(params=zero))
    for _ in range(2):
        state, info = run.step(state, data)
    assert bool(info.finite), "not finite where the gradient is zero"
    found = run.algorithm.models(state.server)["global"].params
    of = lambda params: {name: params[name] for name in names or params}
    assert_close(of(found), of(zero), 1e-6)


def assert_same_bits(a: Any, b: Any) -> None:
    """Equal trees, bit for bit."""
    plain = lambda tree: jax.tree.map(
        lambda x: np.asarray(jax.random.key_data(x) if _is_key(x) else x), tree
    )
    a, b = plain(a), plain(b)
    assert jax.tree.leaves(a), "nothing to compare"
    chex.assert_trees_all_equal_dtypes(a, b)
    chex.assert_trees_all_equal(a, b, strict=True)


def assert_close(a: Any, b: Any, tolerance: float = 1e-6) -> None:
    """Trees that differ by rounding only."""
    chex.assert_trees_all_close(a, b, rtol=tolerance, atol=tolerance)


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _differ(a: Any, b: Any, k: int) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return any(not np.array_equal(x[k], y[k]) for x, y in pairs)
