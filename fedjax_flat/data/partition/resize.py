"""The same examples over another number of clients: merged to even sizes, or split."""

import heapq

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.partition.base import Partition, offsets_of


def resized(partition: Partition, num_clients: int, seed: int) -> Partition:
    """`num_clients` clients, each of whole clients of before or each of a part of one.

    Fewer: the largest first, each to the client that has least so far. More: every cut goes to the
    client whose parts are largest, and its shuffled examples are cut evenly.
    """
    partition.check_clients()
    owned = partition.indices.size
    if not 1 <= num_clients <= owned:
        raise errors.UsageError(
            f"{num_clients} clients for {owned} examples: expected between 1 and {owned}."
        )
    rng = np.random.default_rng(seed)
    if num_clients < partition.num_clients:
        return _merged(partition, num_clients, rng)
    if num_clients > partition.num_clients:
        return _split(partition, num_clients, rng)
    return partition


def _merged(partition, num_clients, rng) -> Partition:
    shuffled, sizes = rng.permutation(partition.num_clients), partition.sizes
    group = np.empty(partition.num_clients, int)
    heap = [(0, g) for g in range(num_clients)]
    for k in shuffled[np.argsort(-sizes[shuffled], kind="stable")]:
        size, g = heap[0]
        group[k] = g
        heapq.heapreplace(heap, (size + int(sizes[k]), g))
    of_example = group[partition.client_of]
    order = np.argsort(of_example, kind="stable")
    merged = np.bincount(of_example, minlength=num_clients)
    return Partition(partition.indices[order], offsets_of(merged))


def _split(partition, num_clients, rng) -> Partition:
    sizes = partition.sizes
    parts = np.ones(partition.num_clients, int)
    heap = [(-float(size), k) for k, size in enumerate(sizes)]
    heapq.heapify(heap)
    for _ in range(num_clients - partition.num_clients):
        k = heap[0][1]
        parts[k] += 1
        heapq.heapreplace(heap, (-sizes[k] / parts[k], k))
    first = np.repeat(np.cumsum(parts) - parts, parts)
    of_client = np.repeat(np.arange(partition.num_clients), parts)
    turn = np.arange(num_clients) - first
    new = sizes[of_client] // parts[of_client] + (turn < sizes[of_client] % parts[of_client])
    return Partition(shuffled(partition, rng).indices, offsets_of(new))


def shuffled(partition: Partition, rng: np.random.Generator) -> Partition:
    """The same clients, whose examples are in another order."""
    order = np.lexsort((rng.random(partition.indices.size), partition.client_of))
    return Partition(partition.indices[order], partition.offsets)
