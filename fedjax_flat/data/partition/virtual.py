"""FedVC's virtual clients: of the same size, large clients being cut and small ones repeated.

Hsu, Qi, Brown, "Federated visual classification with real-world data distribution" (ECCV 2020);
Caldarola 2024, section 6.3. With N examples per virtual client, a client with n_k of them becomes
ceil(n_k / N): its shuffled examples are cut every N, and the last piece, or all of a small client,
is filled up from its first ones, again and again. Virtual clients are drawn and weigh alike, so
that a client with more examples takes part more often.

The paper also says how to do without cutting: client k is drawn with a chance of n_k / n and
resamples N examples (`cohort.sampling = sizes`). That draws clients with fewer than N examples less
often; here none is drawn less often than one with N.
"""

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.partition.base import Partition, offsets_of
from fedjax_flat.data.partition.resize import shuffled


class Virtual(Partition):
    """Clients that may have an example several times, or share it with others of one owner."""

    def check(self, count: int, of: str = "example") -> None:
        """Raises unless every index is valid."""
        Partition.of([np.unique(self.indices)]).check(count, of)


def virtual_clients(partition: Partition, size: int, seed: int = 0) -> Virtual:
    """Virtual clients of `size` examples each, those of one client next to each other."""
    if size < 1:
        raise errors.UsageError(
            f"partition.virtual = {size}: expected 1 example or more per virtual client."
        )
    if not partition.indices.size:
        raise errors.UsageError("virtual clients of clients without examples: expected some.")
    own, sizes = shuffled(partition, np.random.default_rng([seed, 20])), partition.sizes
    pieces = -(-sizes // size)
    owner = np.repeat(np.arange(partition.num_clients), pieces)
    piece = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    place = (piece[:, None] * size + np.arange(size)) % sizes[owner, None]
    indices = own.indices[own.offsets[owner, None] + place]
    return Virtual(indices.ravel(), offsets_of(np.full(len(owner), size)))
