"""Who owns which example: labels, or natural owners -> one index list per client."""

from fedjax_flat.data.partition.base import PARTITIONS, Partition
from fedjax_flat.data.partition.clustering import clustering
from fedjax_flat.data.partition.dirichlet import dirichlet
from fedjax_flat.data.partition.iid import iid
from fedjax_flat.data.partition.natural import names_of, natural
from fedjax_flat.data.partition.pachinko import pachinko
from fedjax_flat.data.partition.per_class import per_class
from fedjax_flat.data.partition.proximity import proximity
from fedjax_flat.data.partition.random_places import random_places
from fedjax_flat.data.partition.rare_classes import rare_classes
from fedjax_flat.data.partition.released import released
from fedjax_flat.data.partition.resize import resized
from fedjax_flat.data.partition.shards import shards
from fedjax_flat.data.partition.split import (
    capped,
    follow_owners,
    hold_out,
    imbalance,
    local_split,
    restrict,
)
from fedjax_flat.data.partition.statistics import class_counts, mean_jaccard, statistics
from fedjax_flat.data.partition.stratified import stratified
from fedjax_flat.data.partition.virtual import virtual_clients

__all__ = [
    "PARTITIONS", "Partition", "capped", "class_counts", "clustering", "dirichlet",
    "follow_owners", "hold_out", "iid", "imbalance", "local_split", "mean_jaccard", "names_of",
    "natural", "pachinko", "per_class", "proximity", "random_places", "rare_classes", "released",
    "resized", "restrict", "shards", "statistics", "stratified", "virtual_clients",
]
