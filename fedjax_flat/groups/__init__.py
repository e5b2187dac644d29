"""Which clients train in sequence: what is known of them, how far apart they are, and groups."""

from fedjax_flat.groups.estimators import Probe, classifiers, confidences, reduced, task2vec
from fedjax_flat.groups.laws import GROUPINGS, NAMES, Limits, build
from fedjax_flat.groups.metrics import METRICS, distances, silhouette

__all__ = [
    "GROUPINGS", "METRICS", "NAMES", "Limits", "Probe", "build", "classifiers", "confidences",
    "distances", "reduced", "silhouette", "task2vec",
]
