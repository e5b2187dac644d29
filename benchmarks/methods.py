"""What every method's round costs beside FedAvg's, on W1 (see workloads.py).

    python benchmarks/methods.py [NAME ...] [--turns 9]     times, in turns, as ratios to FedAvg
    python benchmarks/methods.py --memory NAME              peak memory of one of them, alone

FedBN and SiloBN are not among them: the network of W1 has no normalisation. Mora's thesis (table
7.7, ResNet-18 on a GPU) has FedDyn 1.0, FedFA 1.45, FedSAM 1.61, FedMLB 2.31 of FedAvg's time.
"""

import argparse
import resource
import statistics
import time

import jax
import ml_collections
from workloads import W1

import fedjax_flat as ff
from fedjax_flat import experiment
from fedjax_flat.data import Dataset, Examples

CLIENTS = 10
METHODS: dict[str, dict[str, object]] = {
    "FedAvg": {},
    "FedAvg again": {},  # how much of a ratio is noise
    "SWA": {"server.average": "swa", "server.swa.start": 1.0, "server.swa.cycle": 1},
    "WIMA": {"server.average": "wima", "server.wima.window": 100},
    **{name: {"algorithm.name": name} for name in ff.algorithms.METHODS
       if name not in ("fedavg", "fedbn", "silobn")},
    "feddf": {"algorithm.name": "feddf", "data.unlabelled": 0.1},
    "mcd": {"algorithm.name": "mcd", "data.labelled": "0.1"},
    "fedgkd of one model": {"algorithm.name": "fedgkd", "algorithm.fedgkd.models": 1},
    "feddyn+fedmlb": {"algorithm.name": "feddyn+fedmlb"},
    "fedgloss with SAM": {"algorithm.name": "fedgloss", "client.sharpness": "sam"},
    "feddyn with SAM": {"algorithm.name": "feddyn", "client.sharpness": "sam"},
}


def noise(data_dir=None) -> Dataset:
    """The images of W1."""
    del data_dir
    images, labels = W1.data(CLIENTS)
    examples = Examples(images.reshape(-1, *W1.image), labels.reshape(-1))
    return Dataset("noise", examples, examples, W1.classes, 255.0, (0.5,) * 3, (0.25,) * 3)


def config_of(name: str) -> ml_collections.ConfigDict:
    """W1 with one method."""
    if "noise" not in ff.data.SOURCES:
        ff.register.source("noise", noise)
    c = ff.default_config()
    c.rounds = 1000
    c.data.name, c.model.name = "noise", "cnn"
    c.partition.name, c.partition.clients = "iid", CLIENTS
    c.cohort.size = W1.cohort
    c.client.learning_rate, c.client.batch_size = W1.learning_rate, W1.batch
    c.update_from_flattened_dict(METHODS[name])
    return ff.only_used(c)


def a_round(name: str):
    """A function that runs one round of the method and waits for it."""
    built = experiment.build(config_of(name))
    step = jax.jit(built.step, donate_argnums=0)
    states = [built.init()]

    def run():
        states[0], _ = step(states[0], built.data)
        jax.block_until_ready(states[0])

    run()
    return run


def costs(names: list[str], turns: int) -> None:
    """Prints ratios to FedAvg: the median over turns, and that of the least disturbed rounds."""
    rounds = {name: a_round(name) for name in dict.fromkeys(["FedAvg", *names])}
    times: dict[str, list[float]] = {name: [] for name in rounds}
    for _ in range(turns):
        for name, run in rounds.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    for name, seconds in times.items():
        ratios = sorted(s / f for s, f in zip(seconds, times["FedAvg"], strict=True))
        least = min(seconds) / min(times["FedAvg"])
        print(f"{name:<16} {statistics.median(seconds):6.2f} s per round, {least:.3f} x FedAvg "
              f"(least); {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")


def memory(name: str) -> None:
    """Prints the peak memory of this process after two rounds of the method."""
    run = a_round(name)
    run()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{name}: peak {peak:.0f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *METHODS])
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--memory", choices=METHODS)
    args = parser.parse_args()
    if args.memory:
        memory(args.memory)
    else:
        costs(args.names or list(METHODS), args.turns)
