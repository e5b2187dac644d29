"""From settings to everything that an experiment is."""

from fedjax_flat.experiment.assembly import Experiment, build, build_partition, build_task
from fedjax_flat.experiment.config import arguments, default_config, only_used, validate

__all__ = [
    "Experiment", "arguments", "build", "build_partition", "build_task", "default_config",
    "only_used", "validate",
]
