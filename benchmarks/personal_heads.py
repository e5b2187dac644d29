"""10,000 clients with heads of their own: memory of their state, time of a round and an evaluation.

command: python benchmarks/personal_heads.py
Features of 1,280 numbers and 100 classes, as of a frozen MobileNetV2; 5 test examples per client.
Each placement runs in a process of its own, because peak memory is a property of a process.
"""

import argparse
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from many_clients import peak_mb

import fedjax_flat as ff
from fedjax_flat.data import Dataset, Examples, Partition
from fedjax_flat.engine.evaluate import personal_evaluator
from fedjax_flat.report import tables

CLIENTS, EXAMPLES, FEATURES, CLASSES, COHORT = 10_000, 5, 1280, 100, 100


def measure(where: str, strategy: str) -> None:
    """Prints MB of client state, peak MB, seconds of a round and of an evaluation of everybody."""
    random = np.random.default_rng(0)
    count = CLIENTS * EXAMPLES
    examples = Examples(
        random.normal(size=(count, FEATURES)).astype(np.float32),
        random.integers(0, CLASSES, count),
    )
    dataset = Dataset("random", examples, examples, CLASSES, 1.0, (0.0,), (1.0,))
    own = Partition.of(np.arange(count).reshape(CLIENTS, EXAMPLES))
    classes = ff.data.class_counts(own, examples.labels, CLASSES) > 0
    data = ff.data.federate(examples, own, classes=classes)
    model = ff.models.build("linear", num_classes=CLASSES, inputs=dataset.input_shape)
    task = ff.tasks.classification(model, ff.data.preprocess(dataset))
    client = ff.client.local_training(task, ff.client.sgd(0.1), batch_size=5)
    algorithm = ff.algorithms.added(
        lambda worker: ff.algorithms.fp(worker), client, ff.algorithms.oll()
    )
    step = jax.jit(
        ff.round_step(algorithm, ff.uniform(CLIENTS, COHORT), ff.cohort_map("map"), task=task),
        donate_argnums=0,
    )
    chunk = ff.cohort_map(strategy, chunk=100)
    evaluate = jax.jit(personal_evaluator(task, algorithm, EXAMPLES, chunk))
    state = ff.init_state(
        algorithm, task.init(jax.random.key(0)), CLIENTS, jax.random.key(1), client_state_in=where
    )
    everybody = jnp.arange(CLIENTS, dtype=jnp.int32)
    size = sum(x.nbytes for x in jax.tree.leaves(state.clients)) / 1e6
    seconds = {}
    for name in ("first", "then"):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, data))
        middle = time.perf_counter()
        sums = jax.block_until_ready(evaluate(state.server, state.clients, data, everybody))
        seconds[name] = middle - start, time.perf_counter() - middle
    assert float(sums["examples"].sum()) == count
    print(f"{size:.0f} {peak_mb():.0f} {seconds['then'][0]:.3f} {seconds['then'][1]:.3f}")


def main():
    """Prints one row per placement and strategy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--where")
    parser.add_argument("--strategy", default="map")
    args = parser.parse_args()
    if args.where:
        measure(args.where, args.strategy)
        return
    rows = []
    for where, strategy in (("device", "map"), ("device", "chunked"), ("host", "map")):
        command = [sys.executable, __file__, "--where", where, "--strategy", strategy]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        rows.append([f"{where}, {strategy}", *out, f"{float(out[3]) / CLIENTS * 1e6:.0f}"])
    header = ["state, evaluation", "MB of state", "MB peak", "s per round", "s per evaluation",
              "us per client"]
    print(tables.table(header, rows))


if __name__ == "__main__":
    main()
