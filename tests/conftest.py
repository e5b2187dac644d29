"""Strictness for every test, and the small problems they share."""

import os
import pathlib
import tempfile

# Tests compile far more than they compute, so compile quickly, here and in programs that tests
# start. `make test-slow` compiles as users do.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax
import numpy as np
import optax
import pytest

import fedjax_flat as ff
from fedjax_flat.data import Dataset, Examples, Partition

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Each program once per process.
_compiled = tempfile.TemporaryDirectory(prefix="fedjax_flat_tests_")
jax.config.update("jax_compilation_cache_dir", _compiled.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def blobs(num_examples: int, seed: int = 0) -> Dataset:
    """Three classes of noisy 4x4 images."""
    rng = np.random.default_rng(seed)
    centres = rng.uniform(60, 190, (3, 4, 4, 1))
    labels = rng.integers(0, 3, num_examples).astype(np.int32)
    images = np.clip(centres[labels] + rng.normal(0, 30, (num_examples, 4, 4, 1)), 0, 255)
    examples = Examples(images.astype(np.uint8), labels)
    return Dataset("blobs", examples, examples, 3, 255.0, (0.5,), (0.25,))


def partition_of(sizes) -> Partition:
    """Clients of the given sizes, in the order of the examples."""
    ends = np.cumsum(sizes)
    return Partition.of([np.arange(e - n, e) for n, e in zip(sizes, ends, strict=True)])


class Problem:
    """A federated problem of given client sizes with an MLP, built from the public parts."""

    def __init__(self, sizes, *, hidden=(5,), seed=0, num_examples=None):
        self.dataset = blobs(num_examples or max(sum(sizes), 1), seed)
        self.partition = partition_of(sizes)
        self.data = ff.data.federate(self.dataset.train, self.partition)
        module = ff.models.MLP(num_classes=3, hidden=hidden)
        self.model = ff.models.from_linen(module, self.dataset.image_shape)
        self.objective = ff.objective.classification(
            self.model, ff.data.preprocess(self.dataset)
        )
        self.params = jax.jit(self.model.init)(jax.random.key(seed + 100))

    def client(self, *, lr=0.3, client=None, **local):
        local = {"batch_size": 4, **local}
        return ff.client.local_training(self.objective, client or ff.client.sgd(lr), **local)

    def fedavg(self, *, server=None, weighting="examples", **client):
        worker = self.client(**client)
        return ff.algorithms.fedavg(worker, server or optax.sgd(1.0), weighting=weighting)

    def run(self, algorithm, rounds, *, cohort=None, strategy="map", chunk=2, seed=0, sampler=None):
        clients = self.data.num_clients
        sampler = sampler or ff.uniform(clients, cohort or clients)
        step = jax.jit(ff.round_step(algorithm, sampler, ff.cohort_map(strategy, chunk=chunk)))
        state = ff.init_state(algorithm, self.params, clients, jax.random.key(seed))
        for _ in range(rounds):
            state, info = step(state, self.data)
        return state, info


def assert_same_bits(a, b):
    """Equal trees, bit for bit."""
    leaves_a, leaves_b = jax.tree.leaves(a), jax.tree.leaves(b)
    assert len(leaves_a) == len(leaves_b)
    assert leaves_a
    for x, y in zip(leaves_a, leaves_b, strict=True):
        x, y = (np.asarray(jax.random.key_data(v) if is_key(v) else v) for v in (x, y))
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def is_key(x):
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def assert_close(a, b, tolerance=1e-6):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b
    )


def small_config(**overrides):
    """The default experiment, short; keywords with `__` for the dot."""
    config = ff.default_config()
    config.rounds, config.eval.every, config.eval.window = 6, 3, 2
    config.checkpoint.every = 2
    for name, value in overrides.items():
        *path, last = name.split("__")
        node = config
        for part in path:
            node = node[part]
        node[last] = value
    return config


@pytest.fixture(scope="session")
def cifar_dir() -> pathlib.Path:
    """The folder of the CIFAR files, or a skip."""
    folder = os.environ.get("FEDJAX_FLAT_DATA")
    if not folder or not (pathlib.Path(folder) / "cifar-10-batches-py").is_dir():
        pytest.skip("CIFAR-10 is not here: set FEDJAX_FLAT_DATA to the folder that holds it")
    return pathlib.Path(folder)
