"""Federated methods, one short file each, and their names."""

from fedjax_flat.algorithms.base import Algorithm, ClientResult
from fedjax_flat.algorithms.fedavg import fedavg

ALGORITHMS = {"fedavg": fedavg}

__all__ = ["ALGORITHMS", "Algorithm", "ClientResult", "fedavg"]
