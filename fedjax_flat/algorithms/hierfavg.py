"""HierFAVG: servers of clusters between the clients and the cloud; cluster servers of FedVPR.

Liu et al., "Client-edge-cloud hierarchical federated learning" (ICC 2020); Dutto et al.,
"Collaborative visual place recognition through federated learning" (CVPRW 2024), where clusters are
cities or continents and cohorts have as many clients of each.

    in every round, of the clients k of cluster c that take part:
        w_k <- local training from W_c       W_c <- sum_k (n_k / n) w_k        p_c <- p_c + n
    every T_c rounds:   w <- sum_c (p_c / sum p) W_c,   W_c <- w,   p_c <- 0

T_c is tau_2 of HierFAVG, local epochs or steps its tau_1; with T_c = 1 it is FedAvg. A cluster
weighs what it was trained on since the last merge, which is all that it has, as in the paper, if
everybody takes part. Clusters are config.groups, as many as groups.count; what passes between a
cluster's server and the cloud is not counted.
"""

from fedjax_flat.algorithms.bank import EVALUATED, bank
from fedjax_flat.algorithms.base import Algorithm
from fedjax_flat.algorithms.method import Method
from fedjax_flat.client import Client
from fedjax_flat.settings import Setting


def hierfavg(
    client: Client, *, clusters: int, every: int = 10, evaluated: str = "merged",
    weighting: str = "examples",
) -> Algorithm:
    """HierFAVG with so many `clusters`, merged `every` rounds."""
    return bank(
        client, clusters, lambda data: data.cluster, every=every, evaluated=evaluated,
        weighting=weighting,
    )


METHOD = Method(
    "hierfavg", "Liu 2020", "a server for each cluster, then merged",
    lambda p: hierfavg(
        p.client, clusters=p.config.groups.count or 2, weighting=p.weighting, **p.settings
    ),
    optimizer="own", members="clusters",
    settings={
        "every": Setting(10, "T_c: rounds between merges", at_least=1),
        "evaluated": EVALUATED,
    },
)
