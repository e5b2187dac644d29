"""Flat minima in federated learning: one jitted round, and how flat the result is."""

from fedjax_flat import runtime

runtime.apply()  # before anything below starts a backend

# ruff: noqa: E402
from fedjax_flat import (
    algorithms,
    client,
    curvature,
    data,
    landscape,
    models,
    objective,
    rng,
    server,
)
from fedjax_flat.config import arguments, default_config
from fedjax_flat.engine.cohort import cohort_map
from fedjax_flat.engine.evaluate import client_evaluator, evaluator
from fedjax_flat.engine.loop import train
from fedjax_flat.engine.restore import load_run
from fedjax_flat.engine.round import init_state, many_rounds, round_step
from fedjax_flat.engine.sampling import bernoulli, uniform
from fedjax_flat.errors import DivergedError, UsageError
from fedjax_flat.experiment import build
from fedjax_flat.version import __version__

__all__ = [
    "DivergedError", "UsageError", "__version__", "algorithms", "arguments", "bernoulli", "build",
    "client", "client_evaluator", "cohort_map", "curvature", "data", "default_config", "evaluator",
    "init_state", "landscape", "load_run", "many_rounds", "models", "objective", "rng",
    "round_step", "runtime", "server", "train", "uniform",
]
