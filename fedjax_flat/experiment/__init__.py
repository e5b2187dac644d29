"""From settings to everything that an experiment is."""

from fedjax_flat.experiment.assembly import (
    Experiment,
    build,
    build_partition,
    build_style,
    build_task,
)
from fedjax_flat.experiment.config import arguments, default_config, only_used
from fedjax_flat.experiment.phases import phase_configs, pipeline, read_phases, validate

__all__ = [
    "Experiment", "arguments", "build", "build_partition", "build_style", "build_task",
    "default_config", "only_used", "phase_configs", "pipeline", "read_phases", "validate",
]
