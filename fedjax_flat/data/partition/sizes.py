"""How many examples each client has: equal, log-normal, or Dirichlet over clients.

Quantity skew by a Dirichlet over the clients' sizes is that of Li et al., "Federated learning on
non-IID data silos: an experimental study" (2022): sizes are N q with q ~ Dir(size_alpha), so small
values leave some clients nearly, or quite, without examples.
"""

import numpy as np

from fedjax_flat import errors
from fedjax_flat.settings import Setting

SIZES = {
    "size_sigma": Setting(0.0, "deviation of log sizes; 0 is equal sizes", at_least=0),
    "size_alpha": Setting(0.0, "sizes by a Dirichlet over clients; 0 is equal sizes", at_least=0),
}


def client_sizes(
    num_examples: int, num_clients: int, rng, *, size_sigma: float = 0.0, size_alpha: float = 0.0
) -> np.ndarray:
    """Sizes that sum to `num_examples`; equal up to one unless one of the options is set."""
    if not 1 <= num_clients <= num_examples:
        raise errors.UsageError(
            f"{num_clients} clients for {num_examples} examples: expected between 1 and "
            f"{num_examples}."
        )
    for name, value in (("size_sigma", size_sigma), ("size_alpha", size_alpha)):
        if value < 0:
            raise errors.UsageError(f"{name} = {value}: expected 0 (equal sizes) or more.")
    if size_sigma and size_alpha:
        raise errors.UsageError(
            f"size_sigma = {size_sigma} and size_alpha = {size_alpha} are two laws of sizes: set "
            "one of them."
        )
    weights = np.ones(num_clients)
    with np.errstate(over="ignore", invalid="ignore"):
        if size_sigma:
            weights = np.exp(size_sigma * rng.standard_normal(num_clients))
        elif size_alpha:
            weights = rng.dirichlet(np.full(num_clients, size_alpha))
    if not 0 < weights.sum() < np.inf:
        raise errors.UsageError(
            f"size_sigma = {size_sigma}, size_alpha = {size_alpha}: sizes that differ beyond all "
            "numbers. Expected a size_sigma of a few units, or a size_alpha not that near to 0."
        )
    ends = np.round(np.cumsum(weights) / weights.sum() * num_examples).astype(int)
    return np.diff(ends, prepend=0)
