"""Where examples come from and who owns them."""

from fedjax_flat.data.augment import Preprocess, preprocess
from fedjax_flat.data.federated import (
    Batch,
    ClientData,
    FederatedData,
    federate,
    grouped,
    on_device,
    over,
    whole,
)
from fedjax_flat.data.partition import PARTITIONS, Partition, dirichlet, iid, released, statistics
from fedjax_flat.data.shift import SHIFTS, Shift
from fedjax_flat.data.sources import (
    DATA_VARIABLE,
    SOURCES,
    Dataset,
    Examples,
    Source,
    check_labels,
    count_of,
    data_folder,
    from_arrays,
    load,
)

__all__ = [
    "DATA_VARIABLE", "PARTITIONS", "SHIFTS", "SOURCES", "Batch", "ClientData", "Dataset",
    "Examples", "FederatedData", "Partition", "Preprocess", "Shift", "Source", "check_labels",
    "count_of", "data_folder", "dirichlet", "federate", "from_arrays", "grouped", "iid", "load",
    "on_device", "over", "preprocess", "released", "statistics", "whole",
]
