"""FedSeq2Par: from training in sequence to training in parallel, as groups become more.

Caldarola 2024, section 5.2 (5.3)-(5.5), after Zeng et al. (FedGSP, 2022). FedSeq whose groups are
made anew, from the same estimates, whenever f(t) exceeds their number; t = 1, 2, ...

    linear   f(t) = beta (alpha (t - 1) + 1)
    log      f(t) = beta (alpha ln t + 1)
    exp      f(t) = beta (1 + alpha)^(t - 1)

At most as many groups as clients. How f becomes a whole number is not said: `floor` here, `ceil`,
or `bracket`, beta times the floor of what follows it, for which the means that the paper prints for
CIFAR-10 and Shakespeare come out. A share of the groups takes part (cohort.share), so that about
as many clients train in every round. Groups are a function of the round, the estimates and the
seed: a run that was stopped goes on with the same.
"""

import numpy as np

from fedjax_flat import errors
from fedjax_flat.algorithms.addition import Addition
from fedjax_flat.algorithms.method import Method
from fedjax_flat.settings import Setting

LAWS = ("linear", "log", "exp")
ROUNDINGS = ("floor", "ceil", "bracket")


def growth(
    law: str, rounds: int, *, alpha: float, beta: int, rounding: str = "floor"
) -> np.ndarray:
    """f(1) .. f(rounds), as whole numbers."""
    t = np.arange(1, rounds + 1, dtype=float)
    with np.errstate(over="ignore"):
        bracket = errors.lookup("growth", law, {
            "linear": alpha * (t - 1) + 1, "log": alpha * np.log(t) + 1,
            "exp": (1 + alpha) ** (t - 1),
        })
        whole = errors.lookup("rounding", rounding, {
            "floor": np.floor(beta * bracket), "ceil": np.ceil(beta * bracket),
            "bracket": beta * np.floor(bracket),
        })
    return np.minimum(whole, 2.0**31 - 1).astype(np.int64)


def stages(counts: np.ndarray, clients: int) -> tuple[np.ndarray, np.ndarray]:
    """(rounds from 0 in which groups are made, how many): whenever f exceeds their number."""
    if counts[0] > clients:
        raise errors.UsageError(
            f"fedseq2par begins with {counts[0]} groups of {clients} clients: expected at most "
            f"{clients}. Lower algorithm.fedseq2par.beta."
        )
    reached = np.maximum.accumulate(np.minimum(counts, clients))
    starts = np.flatnonzero(np.diff(reached, prepend=0) > 0)
    return starts.astype(np.int32), reached[starts].astype(np.int32)


def fedseq2par() -> Addition:
    """FedSeq; how groups grow is the business of who makes them."""
    return Addition()


METHOD = Method(
    "fedseq2par", "Caldarola 2024", "FedSeq with ever more, smaller groups",
    add=lambda s: fedseq2par(), members="groups",
    settings={
        "growth": Setting("exp", "of the number of groups", choices=LAWS),
        "alpha": Setting(4.6e-4, "how fast", at_least=0),
        "beta": Setting(5, "groups in the first round", at_least=1),
        "rounding": Setting("floor", "of the law", choices=ROUNDINGS),
    },
)
