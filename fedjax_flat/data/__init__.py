"""Where examples come from and who owns them."""

from fedjax_flat.data import attacks as attacks  # registers its shift
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
from fedjax_flat.data.host import HostData
from fedjax_flat.data.partition import (
    PARTITIONS,
    Partition,
    class_counts,
    dirichlet,
    hold_out,
    iid,
    imbalance,
    local_split,
    mean_jaccard,
    names_of,
    natural,
    pachinko,
    per_class,
    released,
    resized,
    restrict,
    shards,
    statistics,
)
from fedjax_flat.data.rdn import Normals, normals
from fedjax_flat.data.shift import SHIFTS, Shift
from fedjax_flat.data.sources import (
    DATA_VARIABLE,
    SOURCES,
    Dataset,
    Examples,
    Source,
    check_labels,
    check_places,
    count_of,
    data_folder,
    from_arrays,
    load,
)
from fedjax_flat.data.styles import STYLES

__all__ = [
    "DATA_VARIABLE", "PARTITIONS", "SHIFTS", "SOURCES", "STYLES", "Batch", "ClientData", "Dataset",
    "Examples", "FederatedData", "HostData", "Normals", "Partition", "Preprocess", "Shift",
    "Source",
    "check_labels", "check_places", "class_counts", "count_of", "data_folder", "dirichlet",
    "federate",
    "from_arrays", "grouped", "hold_out", "iid", "imbalance", "load", "local_split",
    "mean_jaccard", "names_of", "natural", "normals", "on_device", "over", "pachinko", "per_class",
    "preprocess", "released", "resized", "restrict", "shards", "statistics", "whole",
]
