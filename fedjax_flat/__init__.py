"""Flat minima in federated learning: one jitted round, and how flat the result is.

Names are imported when they are first used, so that `fedjax-flat --help` need not wait for jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fedjax_flat import runtime
from fedjax_flat.errors import DivergedError, UsageError
from fedjax_flat.settings import Setting
from fedjax_flat.version import __version__

runtime.apply()  # before anything starts a backend

if TYPE_CHECKING:
    from fedjax_flat import (  # noqa: F401
        algorithms,
        client,
        curvature,
        data,
        groups,
        landscape,
        models,
        parts,
        plot,
        plugins,
        register,
        rng,
        server,
        tasks,
        testing,
        wire,
    )

_MODULES = (
    "algorithms", "client", "curvature", "data", "groups", "landscape", "models", "parts", "plot",
    "plugins", "register", "rng", "server", "tasks", "testing", "wire",
)
_NAMES = {
    "arguments": "experiment.config",
    "bernoulli": "engine.sampling",
    "build": "experiment.assembly",
    "client_evaluator": "engine.evaluate",
    "cohort_map": "engine.cohort",
    "default_config": "experiment.config",
    "evaluator": "engine.evaluate",
    "searcher": "engine.evaluate",
    "init_state": "engine.round",
    "load_run": "run.restore",
    "many_rounds": "engine.round",
    "Sweep": "sweep.plan",
    "once": "engine.sampling",
    "only_used": "experiment.config",
    "phase_configs": "experiment.phases",
    "pipeline": "experiment.phases",
    "read_phases": "experiment.phases",
    "round_step": "engine.round",
    "rounds_to_see": "engine.coverage",
    "train": "run.phases",
    "uniform": "engine.sampling",
    "validate": "experiment.phases",
}
__all__ = [
    "DivergedError", "Setting", "UsageError", "__version__", "runtime", *_MODULES, *_NAMES,
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"fedjax_flat.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(f"fedjax_flat.{_NAMES[name]}"), name)
    raise AttributeError(f"module 'fedjax_flat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
