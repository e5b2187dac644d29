"""What a round of sub-models costs beside the full model's: FEMNIST CNN, noise for images.

    python benchmarks/submodels.py [--turns 5] [--clients 4] [--examples 100]

Every client of a round is of the tier; `HFD` draws one of the three for each. Rounds are timed in
turns; compare within one run only. FLOPs are XLA's count for one gradient of a batch.
"""

import argparse
import statistics
import time

import jax
import numpy as np

import fedjax_flat as ff
from fedjax_flat import experiment
from fedjax_flat.algorithms.submodels import kept_count
from fedjax_flat.data import Dataset, Examples
from fedjax_flat.models import units

ROWS: dict[str, dict[str, object]] = {
    "full": {},
    "full again": {},  # how much of a ratio is noise
    **{f"tier {d:g}": {"submodel.tiers": (d,)} for d in (1.0, 0.8, 0.75, 0.7, 0.5)},
    "HFD": {"submodel.tiers": (0.8, 0.75, 0.7)},
    "CE-HFD": {"submodel.tiers": (0.8, 0.75, 0.7), "wire.up": "8bit", "wire.down": "8bit"},
}
BATCH = 10


def a_round(settings: dict[str, object], clients: int, examples: int):
    """A function that runs one round and waits for it."""

    def noise() -> Dataset:
        """Random images."""
        rng = np.random.default_rng(0)
        count = clients * examples
        images = rng.integers(0, 256, (count, 28, 28, 1), np.uint8)
        some = Examples(images, rng.integers(0, 62, count).astype(np.int32))
        return Dataset("noise", some, some, 62, 255.0, (0.5,), (0.25,))

    if "noise" not in ff.data.SOURCES:
        ff.register.source("noise", noise)
    c = ff.default_config()
    c.data.name, c.model.name = "noise", "femnist_cnn"
    c.partition.name, c.partition.clients, c.cohort.size = "iid", clients, clients
    c.client.learning_rate, c.client.batch_size = 0.004, BATCH
    c.update_from_flattened_dict(settings)
    built = experiment.build(c)
    step = jax.jit(built.step, donate_argnums=0)
    states = [built.init()]

    def run():
        states[0], _ = step(states[0], built.data)
        jax.block_until_ready(states[0])

    run()
    return run


def flops(share: float) -> float:
    """Of one gradient with a batch, by the network with this share of units."""
    model = ff.models.build("femnist_cnn", num_classes=62, inputs=(28, 28, 1))
    structure = model.units()
    assert structure
    kept = [np.arange(kept_count(n, share)) for n in structure.hidden]
    cut = lambda key: units.extract(structure, model.init(key), kept)
    small = jax.eval_shape(cut, jax.random.key(0))
    images = jax.ShapeDtypeStruct((BATCH, 28, 28, 1), np.float32)
    gradient = jax.grad(lambda v, x: model.apply(v, x).logits.sum())
    return jax.jit(gradient).lower(small, images).cost_analysis()["flops"]


def main(turns: int, clients: int, examples: int) -> None:
    """Prints seconds and ratios to the full model."""
    rounds = {name: a_round(s, clients, examples) for name, s in ROWS.items()}
    times: dict[str, list[float]] = {name: [] for name in rounds}
    for _ in range(turns):
        for name, run in rounds.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    for name, seconds in times.items():
        ratios = sorted(s / f for s, f in zip(seconds, times["full"], strict=True))
        work = flops(float(name.split()[1])) / flops(1.0) if name.startswith("tier") else None
        print(f"{name:<11} {statistics.median(seconds):6.2f} s per round, "
              f"{statistics.median(ratios):.2f} of full ({ratios[0]:.2f} to {ratios[-1]:.2f})"
              + (f"; FLOPs {work:.2f}" if work else ""))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--examples", type=int, default=100)
    args = parser.parse_args()
    main(args.turns, args.clients, args.examples)
