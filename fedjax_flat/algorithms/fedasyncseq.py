"""FedAsyncSeq: chains of groups that are merged every R rounds only.

Caldarola 2024, section 5.2 and algorithm 6. The server keeps a bank of chains, as many as a cohort
has groups. In every round chain i goes on, from its own model, through the clients of the i-th
group that was drawn; every R rounds the chains are averaged by the examples they have seen since
the last time, and all go on from there:

    W_i  <-  W_i after E_S times through the clients of S_i          p_i <- p_i + |D_{S_i}|
    t mod R = 0:   w <- sum_i (p_i / sum p) W_i,   W_i <- w,   p_i <- 0

R is the number of groups in the paper's experiments (`every` = 0); R = 1 is FedSeq. `evaluated` is
what is looked at between merges, which the paper leaves open: the last merged model, or the mean of
the bank by p, as in the released code. cohort.sampling = apart never gives a chain the group that
it has just left, as the paper asks. The paper lets the fastest chain begin the next round; here,
as in its algorithm 6, all keep step.
"""

from fedjax_flat.algorithms.bank import EVALUATED, bank
from fedjax_flat.algorithms.base import Algorithm
from fedjax_flat.algorithms.method import Method
from fedjax_flat.client import Client
from fedjax_flat.settings import Setting


def fedasyncseq(
    client: Client, *, chains: int, every: int = 0, evaluated: str = "merged"
) -> Algorithm:
    """FedAsyncSeq with a bank of `chains`, merged `every` rounds; 0: as many as groups."""
    return bank(client, chains, lambda data: data.slot, every=every, evaluated=evaluated)


METHOD = Method(
    "fedasyncseq", "Caldarola 2024", "groups in sequence, chains merged later",
    lambda p: fedasyncseq(p.client, chains=p.config.cohort.size, **p.settings),
    optimizer="own", members="groups", weighs=False,
    settings={
        "every": Setting(0, "R: rounds between merges; 0 is the number of groups", at_least=0),
        "evaluated": EVALUATED,
    },
)
