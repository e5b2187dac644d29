"""The demo: FedAvg, FedSAM, FedASAM and FedASAM + SWA with one class per client, three seeds."""

import os
import pathlib
from collections.abc import Sequence

import ml_collections
import numpy as np

from fedjax_flat.config import default_config
from fedjax_flat.engine.loop import train
from fedjax_flat.report import figures, tables

# label: (folder, client.sharpness, client.rho, server.average). The radii are the better of a few
# tried on these digits.
METHODS: dict[str, tuple[str, str, float, str]] = {
    "FedAvg": ("fedavg", "none", 0.0, "none"),
    "FedSAM": ("fedsam", "sam", 0.2, "none"),
    "FedASAM": ("fedasam", "asam", 1.0, "none"),
    "FedASAM + SWA": ("fedasam_swa", "asam", 1.0, "swa"),
}


def demo(
    run: str | os.PathLike,
    *,
    rounds: int = 300,
    seeds: Sequence[int] = (0, 1, 2),
    progress: bool = True,
) -> int:
    """Trains all, prints the table, draws the figure; the signal number if stopped."""
    curves: dict[str, list[list[dict]]] = {}
    rows = []
    for label, (folder, sharpness, rho, average) in METHODS.items():
        model = "swa" if average == "swa" else "global"
        curves[label], found = [], []
        for seed in seeds:
            config = demo_config(sharpness, rho, average, rounds=rounds, seed=seed)
            result = train(config, pathlib.Path(run) / f"{folder}_{seed}", progress=progress)
            if result.stopped_by:
                print(f"Stopped. Run the same command to go on; what is done is in {run}.")
                return result.stopped_by
            window = config.eval.window
            found.append(
                [
                    100 * result.accuracy(window, model=model)[0],
                    result.accuracy(window, model=model, name="loss")[0],
                    result.accuracy(window, split="cohort", model="local", name="drift")[0],
                ]
            )
            curves[label].append(
                [r for r in result.records if r["model"] in (model, "local")]
            )
        mean, deviation = np.mean(found, axis=0), np.std(found, axis=0)
        formats = ("{:.2f} ± {:.2f}", "{:.3f} ± {:.3f}", "{:.2f} ± {:.2f}")
        rows.append(
            [label] + [f.format(*v) for f, *v in zip(formats, mean, deviation, strict=True)]
        )
    print(f"\nHandwritten digits, one class per client, 2 of 20 clients per round. Means over the "
          f"last {window}\nof {rounds} rounds; mean ± deviation of {len(seeds)} seed(s)\n")
    print(tables.table(["method", "test accuracy (%)", "test loss", "drift"], rows))
    picture = figures.accuracy_curves(curves, pathlib.Path(run) / "figures" / "accuracy.png")
    print(f"\nfigure: {picture}\nruns:   {run}")
    return 0


def demo_config(
    sharpness: str, rho: float, average: str, *, rounds: int, seed: int
) -> ml_collections.ConfigDict:
    """One run of the demo."""
    config = default_config()
    config.rounds, config.seed = rounds, seed
    config.partition.alpha = 0.0
    config.cohort.size = 2
    config.client.sharpness, config.client.rho = sharpness, rho
    config.server.average, config.server.swa.cycle = average, 5
    config.eval.every, config.eval.window = 5, 20
    config.checkpoint.every = 100
    return config
