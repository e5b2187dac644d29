"""Strictness for every test, and the small problems they share."""

import logging
import os
import pathlib
import tempfile

# Tests compile far more than they compute, so compile quickly, here and in programs that tests
# start. `make test-slow` compiles as users do.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1":
    # A third of the compiler's time, measured for the rounds of six methods with jax 0.10.2.
    for quick in ("xla_cpu_use_fusion_emitters=false", "xla_cpu_parallel_codegen_split_count=1"):
        if quick not in os.environ.get("XLA_FLAGS", ""):
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{quick}".strip()

# Pure JAX unless a test, or whoever calls, asks for the compiled kernels.
os.environ.setdefault("FEDJAX_FLAT_KERNELS", "jax")

# Nothing of other runs, nor left for them.
os.environ.setdefault("FEDJAX_FLAT_COMPILE_CACHE", "0")

import jax
import optax
import pytest

import fedjax_flat as ff
from fedjax_flat import testing
from fedjax_flat.testing import assert_close, assert_same_bits  # noqa: F401 (for the tests)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Each program once per process.
_compiled = tempfile.TemporaryDirectory(prefix="fedjax_flat_tests_")
jax.config.update("jax_compilation_cache_dir", _compiled.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@pytest.fixture(autouse=True)
def logging_as_it_was():
    """What --quiet does to a test's log messages ends with it."""
    logger = logging.getLogger("fedjax_flat")
    level = logger.level
    yield
    logger.setLevel(level)


class Problem(testing.Problem):
    """With short ways to train on it."""

    def client(self, *, lr=0.3, client=None, **local):
        local = {"batch_size": 4, **local}
        return ff.client.local_training(self.task, client or ff.client.sgd(lr), **local)

    def fedavg(self, *, server=None, weighting="examples", **client):
        worker = self.client(**client)
        return ff.algorithms.fedavg(worker, server or optax.sgd(1.0), weighting=weighting)

    def run(self, algorithm, rounds, *, cohort=None, strategy="map", chunk=2, seed=0, sampler=None):
        clients = self.data.num_clients
        sampler = sampler or ff.uniform(clients, cohort or clients)
        over = ff.cohort_map(strategy, chunk=chunk)
        step = jax.jit(ff.round_step(algorithm, sampler, over, task=self.task))
        state = ff.init_state(algorithm, self.variables, clients, jax.random.key(seed))
        for _ in range(rounds):
            state, info = step(state, self.data)
        return state, info


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
