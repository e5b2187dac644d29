"""Examples on the host: what that costs beside the device, and a million clients.

command: python benchmarks/host_data.py [--turns 9]
First W1 (the papers' CNN) with examples on the device and on the host, in turns in one process.
Then clients of 50 examples of 28x28 in a sparse file, cohorts of 100: a thousand and a million,
each in a process of its own, because peak memory is a property of a process.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
import optax
from systems import our_network
from workloads import W1, Conv, Workload

import fedjax_flat as ff
from fedjax_flat.data import Dataset, Examples, HostData, Partition
from fedjax_flat.engine.feed import Feed
from fedjax_flat.engine.round import cohorts
from fedjax_flat.report import tables

SMALL = Workload(
    "small", (28, 28, 1), (Conv(16, 5, 2),), (64,), clients=0, examples=50, cohort=100, batch=10,
    learning_rate=0.1,
)


def rounds_of(workload: Workload, clients: int, examples: Examples, partition: Partition, place):
    """`round()` of FedAvg with examples on the `device` or the `host`."""
    channels = workload.image[2]
    dataset = Dataset("bench", examples, examples, 10, 255.0, (0.5,) * channels, (0.25,) * channels)
    over = ff.cohort_map()
    model = ff.models.from_linen(our_network(workload), workload.image)
    task = ff.tasks.classification(model, ff.data.preprocess(dataset))
    local = ff.client.local_training(
        task, ff.client.sgd(workload.learning_rate), batch_size=workload.batch
    )
    algorithm = ff.algorithms.fedavg(local, optax.sgd(1.0))
    sampler = ff.uniform(clients, workload.cohort)
    step = jax.jit(ff.round_step(algorithm, sampler, over, task=task), donate_argnums=0)
    state = ff.init_state(algorithm, task.init(jax.random.key(0)), clients, jax.random.key(1))
    box, done = [state], [0]
    if place == "device":
        data = ff.data.federate(examples, partition)
        of_round = lambda round: data
    else:
        host = HostData(examples, partition)
        of_round = Feed(lambda round: host, jax.jit(cohorts(sampler, over)), state.key).of_round

    def round():
        box[0] = jax.block_until_ready(step(box[0], of_round(done[0])))[0]
        done[0] += 1

    return round


def beside_device(turns: int) -> None:
    """W1 in turns."""
    images, labels = W1.data()
    examples = Examples(images.reshape(-1, *W1.image), labels.reshape(-1))
    partition = Partition.of(np.arange(labels.size).reshape(labels.shape))
    rounds = {p: rounds_of(W1, W1.clients, examples, partition, p) for p in ("device", "host")}
    seconds: dict[str, list[float]] = {name: [] for name in rounds}
    for turn in range(turns + 1):
        for name, round in rounds.items():
            start = time.perf_counter()
            round()
            if turn:  # the first compiles
                seconds[name].append(time.perf_counter() - start)
    median = {name: statistics.median(s) for name, s in seconds.items()}
    rows = [[name, f"{W1.cohort * W1.examples / s:.0f}", f"{median['device'] / s:.3f}"]
            for name, s in median.items()]
    print(tables.table(["W1, examples on the", "images/s", "of device"], rows))


def many(clients: int, path: str) -> None:
    """Prints peak memory before and after (MB), and seconds per round."""
    shape = (clients * SMALL.examples, *SMALL.image)
    with open(path, "r+b") as file:
        file.truncate(np.prod(shape))
    images = np.memmap(path, np.uint8, "r", shape=shape)
    labels = np.zeros(shape[0], np.uint8)
    offsets = SMALL.examples * np.arange(clients + 1)
    partition = Partition(np.arange(shape[0], dtype=np.int32), offsets)
    before = peak_mb()
    round = rounds_of(SMALL, clients, Examples(images, labels), partition, "host")
    round()
    times = []
    for _ in range(20):
        start = time.perf_counter()
        round()
        times.append(time.perf_counter() - start)
    print(f"{before:.0f} {peak_mb():.0f} {statistics.median(times):.4f}")


def peak_mb() -> float:
    """Peak resident memory of this process."""
    # Not getrusage's, which a process inherits from the one that started it.
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024


def main():
    """Prints two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--clients", type=int)
    parser.add_argument("--file")
    args = parser.parse_args()
    if args.clients:
        many(args.clients, args.file)
        return
    beside_device(args.turns)
    rows = []
    for clients in (1_000, 1_000_000):
        with tempfile.NamedTemporaryFile() as file:
            command = [sys.executable, __file__, "--clients", str(clients), "--file", file.name]
            out = subprocess.run(command, check=True, capture_output=True, text=True)
        gigabytes = clients * SMALL.examples * 28 * 28 / 1e9
        rows.append([f"{clients:,}", f"{gigabytes:.2f}", *out.stdout.split()])
    print(tables.table(["clients", "GB of images", "MB before", "MB peak", "s per round"], rows))


if __name__ == "__main__":
    main()
