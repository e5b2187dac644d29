"""Where examples come from and who owns them."""

from fedjax_flat.data.augment import Preprocess, preprocess
from fedjax_flat.data.federated import Batch, ClientData, FederatedData, federate, on_device
from fedjax_flat.data.partition import Partition, dirichlet, iid, released, statistics
from fedjax_flat.data.sources import DATA_VARIABLE, Dataset, Examples, load

__all__ = [
    "DATA_VARIABLE", "Batch", "ClientData", "Dataset", "Examples", "FederatedData", "Partition",
    "Preprocess", "dirichlet", "federate", "iid", "load", "on_device", "preprocess", "released",
    "statistics",
]
