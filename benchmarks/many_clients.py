"""10,000 clients of 5 examples, cohorts of 100 and 1,000 under `chunked`: time and peak memory.

command: python benchmarks/many_clients.py
Each cohort runs in a process of its own, because peak memory is a property of a process.
"""

import argparse
import resource
import subprocess
import sys
import time

import jax
import numpy as np
import optax

import fedjax_flat as ff
from fedjax_flat.data import Dataset, Examples, Partition
from fedjax_flat.report import tables

CLIENTS, EXAMPLES, ROUNDS = 10_000, 5, 20


def measure(cohort: int, strategy: str) -> None:
    """Prints the peak memory (MB) before and after, and seconds per round."""
    rng = np.random.default_rng(0)
    count = CLIENTS * EXAMPLES
    examples = Examples(
        rng.integers(0, 256, (count, 28, 28, 1), np.uint8), rng.integers(0, 10, count)
    )
    dataset = Dataset("random", examples, examples, 10, 255.0, (0.5,), (0.25,))
    data = ff.data.federate(examples, Partition.of(np.arange(count).reshape(CLIENTS, EXAMPLES)))
    model = ff.models.from_linen(ff.models.MLP(10, hidden=(200,)), dataset.input_shape)
    task = ff.tasks.classification(model, ff.data.preprocess(dataset))
    local = ff.client.local_training(task, ff.client.sgd(0.1), batch_size=5)
    algorithm = ff.algorithms.fedavg(local, optax.sgd(1.0))
    over = ff.cohort_map(strategy, chunk=20)
    step = ff.round_step(algorithm, ff.uniform(CLIENTS, cohort), over, task=task)
    run = jax.jit(ff.many_rounds(step, ROUNDS), donate_argnums=0)
    state = ff.init_state(algorithm, task.init(jax.random.key(0)), CLIENTS, jax.random.key(1))
    before = peak_mb()
    state, _ = jax.block_until_ready(run(state, data, 1))
    start = time.perf_counter()
    state, _ = jax.block_until_ready(run(state, data, ROUNDS))
    seconds = (time.perf_counter() - start) / ROUNDS
    print(f"{before:.0f} {peak_mb():.0f} {seconds:.4f}")


def peak_mb() -> float:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main():
    """Prints one row per cohort."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cohort", type=int)
    parser.add_argument("--strategy", default="chunked")
    args = parser.parse_args()
    if args.cohort:
        measure(args.cohort, args.strategy)
        return
    rows = []
    for strategy, cohort in (("chunked", 100), ("chunked", 1000), ("map", 1000), ("vmap", 1000)):
        command = [sys.executable, __file__, "--cohort", str(cohort), "--strategy", strategy]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        per_client = float(out[2]) / cohort * 1e6
        rows.append([f"{strategy} {cohort}", out[0], out[1], out[2], f"{per_client:.0f}"])
    header = ["strategy, cohort", "MB before", "MB peak", "s per round", "us per client"]
    print(tables.table(header, rows))


if __name__ == "__main__":
    main()
