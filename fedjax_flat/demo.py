"""The demo: FedAvg with one class per client, next to the same with identical clients."""

import os
import pathlib

from fedjax_flat.config import default_config
from fedjax_flat.engine.loop import train
from fedjax_flat.report import figures, tables

SPLITS = {
    "homogeneous (IID)": ("iid", 0.0),
    "one class per client": ("dirichlet", 0.0),
}


def demo(run: str | os.PathLike, *, rounds: int = 300, progress: bool = True) -> int:
    """Trains both, prints the table, draws the figure; the signal number if stopped."""
    runs, rows = {}, []
    for label, (partition, alpha) in SPLITS.items():
        config = default_config()
        config.rounds = rounds
        config.partition.name, config.partition.alpha = partition, alpha
        config.cohort.size = 5
        config.eval.every, config.eval.window = 5, 20
        folder = pathlib.Path(run) / partition
        result = train(config, folder, progress=progress)
        if result.stopped_by:
            print(f"Stopped. Run the same command to go on; what is done is in {run}.")
            return result.stopped_by
        accuracy = result.accuracy(config.eval.window)
        loss = result.accuracy(config.eval.window, name="loss")
        drift = result.accuracy(config.eval.window, split="cohort", model="local", name="drift")
        rows.append(
            [label, tables.percent(*accuracy[:2]), f"{loss[0]:.3f}", f"{drift[0]:.3f}"]
        )
        runs[label] = result.records
    print(f"\nFedAvg on handwritten digits, 20 clients, 5 per round; means over the last "
          f"{config.eval.window} of {rounds} rounds\n")
    print(tables.table(["clients", "test accuracy (%)", "test loss", "drift"], rows))
    picture = figures.accuracy_curves(runs, pathlib.Path(run) / "figures" / "accuracy.png")
    print(f"\nfigure: {picture}\nruns:   {run}")
    return 0
