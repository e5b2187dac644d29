"""How long it takes until every client had a turn, where each round draws from all of them.

The batch coupon collector: `cohort` distinct clients of K per round. Of a cohort, a number of
clients that nobody has seen yet is hypergeometric, given how many have been seen; so a round is one
draw of that number, for as many runs as asked at once. In the mean it takes about

    (K / cohort) ln(1 / (1 - share)) rounds to see a share, (K / cohort) (ln K + 0.577) to see all

(table 3.6 of Fani's thesis has 1,000 runs).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedjax_flat import errors


class Rounds(NamedTuple):
    """Over the runs."""

    mean: float
    deviation: float


def rounds_to_see(
    clients: int,
    cohort: int,
    shares: Sequence[float] = (0.25, 0.5, 0.75, 1.0),
    *,
    runs: int = 1000,
    seed: int = 0,
) -> dict[float, Rounds]:
    """Rounds until at least each of these shares of the clients took part."""
    if not 1 <= cohort <= clients:
        raise errors.UsageError(
            f"a cohort of {cohort} from {clients} clients: expected between 1 and {clients}."
        )
    for share in shares:
        if not 0 < share <= 1:
            raise errors.UsageError(f"a share of {share}: expected more than 0 and at most 1.")
    errors.at_least("runs", runs, 1)
    random = np.random.default_rng(seed)
    needed = {share: math.ceil(share * clients) for share in shares}
    reached = {share: np.zeros(runs, np.int64) for share in shares}
    seen = np.zeros(runs, np.int64)
    t = 0
    while any((r == 0).any() for r in reached.values()):
        t += 1
        seen = seen + random.hypergeometric(clients - seen, seen, cohort)
        for share, rounds in reached.items():
            rounds[(rounds == 0) & (seen >= needed[share])] = t
    return {share: Rounds(float(r.mean()), float(r.std())) for share, r in reached.items()}
