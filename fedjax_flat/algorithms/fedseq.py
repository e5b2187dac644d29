"""FedSeq: groups of different clients train one model in sequence, as if they were one client.

Zaccone, Rizzardi, Caldarola, Ciccone, Caputo, "Speeding up heterogeneous federated learning with
sequentially trained superclients" (ICPR 2022); Caldarola 2024, section 5.2 and algorithm 6.

    groups S_1 .. S_N of clients, made before training (config.groups; groups/ has the laws)
    in every round, of the groups S_i that were drawn, their clients in random order:
        w_i <- w;   E_S times, for each client k of S_i in turn:  w_i <- E_k local epochs on D_k
    w <- sum_i (|D_{S_i}| / sum) w_i

E_S is groups.passes, with the same order in each (the released code draws another), E_k
client.epochs. As it only says who trains after whom, it goes with other methods: fedprox+fedseq,
feddyn+fedseq, with SAM, ASAM, SWA and WIMA. The anchor of their terms is the model that the group
received, client state is a group's. Groups of one client are the method without groups, bit for
bit: a client draws its batches by its own number. In a round of m groups with n clients, m models
travel down, m up, and E_S n - m from client to client, counted in `bytes_across`.

FedCyclic makes one chain of all clients of the round, w going through all of them; nothing is
averaged, and m is 1. It is FedSeq with one group if everybody takes part.
"""

from fedjax_flat.algorithms.addition import Addition
from fedjax_flat.algorithms.method import Method


def fedseq() -> Addition:
    """Changes nothing but who the members of a cohort are (data.grouped)."""
    return Addition()


METHOD = (
    Method(
        "fedseq", "Zaccone 2022", "groups of clients train in sequence", add=lambda s: fedseq(),
        members="groups",
    ),
    Method(
        "fedcyclic", "Zaccone 2022", "all clients train in sequence",
        add=lambda s: fedseq(), members="chain",
    ),
)
