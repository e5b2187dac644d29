"""The demo: FedAvg, FedSAM, FedASAM and FedASAM + SWA with one class per client, three seeds.

How accurate each becomes, and how flat: Hessian eigenvalues and loss surfaces of the last models.
It ends with the report page, `report.html`.
"""

import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from fedjax_flat import curvature, errors, experiment, landscape
from fedjax_flat.report import analysis, figures, page, results, tables
from fedjax_flat.run.loop import train

# label: (folder, client.sharpness, client.rho, server.average). The radii are the best of a few on
# a validation part: benchmarks/demo_radii.py.
METHODS: dict[str, tuple[str, str, float, str]] = {
    "FedAvg": ("fedavg", "none", 0.0, "none"),
    "FedSAM": ("fedsam", "sam", 0.2, "none"),
    "FedASAM": ("fedasam", "asam", 1.0, "none"),
    "FedASAM + SWA": ("fedasam_swa", "asam", 1.0, "swa"),
}
WINDOW, TOP, SURFACE_POINTS = 20, 5, 15


class Outcome(NamedTuple):
    """One run: its records, numbers, and for the first seed the surface around its model."""

    records: list[dict[str, Any]]
    accuracy: float
    loss: float
    last_loss: float  # of the last model, on all training examples
    spectrum: dict[str, np.ndarray]
    surface: landscape.Grid | None

    @property
    def eigenvalues(self) -> np.ndarray:
        """The largest first."""
        return self.spectrum["eigenvalues"]


def demo(
    run: str | os.PathLike,
    *,
    rounds: int = 300,
    seeds: Sequence[int] = (0, 1, 2),
    progress: bool = True,
) -> int:
    """Trains all, prints the table, draws the figure; the signal number if stopped."""
    outcomes: dict[str, list[Outcome]] = {}
    built = experiment.build(demo_config("none", 0.0, "none", rounds=rounds, seed=0))
    loss = curvature.of_examples(built.task, built.train_examples)  # the same for all
    for label, (folder, sharpness, rho, average) in METHODS.items():
        model = "swa" if average == "swa" else "global"
        outcomes[label] = []
        for seed in seeds:
            config = demo_config(sharpness, rho, average, rounds=rounds, seed=seed)
            result = train(config, pathlib.Path(run) / f"{folder}_{seed}", progress=progress)
            if result.stopped_by:
                done = errors.printable(str(run))
                print(f"Stopped. Run the same command to go on; what is done is in {done}.")
                return result.stopped_by
            outcomes[label].append(measure(loss, result, model, draw=seed == seeds[0]))
            keep(pathlib.Path(run) / f"{folder}_{seed}", model, rounds, loss, outcomes[label][-1])
    print("\nHandwritten digits, one class per client, 2 of 20 clients per round.\n"
          f"Accuracy and loss: means over the last {WINDOW} of {rounds} rounds.\n"
          "Curvature: of the last model, on all training examples.\n"
          f"Mean ± deviation of {len(seeds)} seed(s).\n")
    header = ["method", "test accuracy (%)", "test loss", "lambda_1", "lambda_1/lambda_5"]
    print(tables.table(header, [row(label, found) for label, found in outcomes.items()]))
    picture = figures.overview(
        {label: [o.records for o in found] for label, found in outcomes.items()},
        {label: np.mean([o.eigenvalues for o in found], axis=0)
         for label, found in outcomes.items()},
        {label: o.surface for label, found in outcomes.items() for o in found if o.surface},
        pathlib.Path(run) / "figures" / "demo.png",
    )
    folders = [pathlib.Path(run) / f"{folder}_{seed}"
               for folder, *_ in METHODS.values() for seed in seeds]
    shown = page.report(folders, pathlib.Path(run) / "report.html")
    print(f"\n{tables.named('figure', picture)}\n{tables.named('runs', run)}\n"
          f"{tables.named('report', shown)}  (open it in a browser)")
    return 0


def measure(loss: curvature.DataLoss, result: Any, model: str, draw: bool) -> Outcome:
    """Accuracy and loss over the last rounds, curvature of the last model."""
    params = result.models[model].params
    spectrum = curvature.lanczos(
        curvature.flat_hessian(loss, params), TOP, key=jax.random.key(0)
    )
    surface = None
    if draw:
        keys = jax.random.split(jax.random.key(1))
        first, second = (landscape.filter_normalised(k, params) for k in keys)
        axis = landscape.symmetric(1.0, SURFACE_POINTS)
        surface = landscape.grid(loss, params, (first, second), axis, axis)
    return Outcome(
        records=[r for r in result.records if r["model"] in (model, "local")],
        accuracy=100 * result.score(WINDOW, model=model)[0],
        loss=result.score(WINDOW, model=model, name="loss")[0],
        last_loss=float(loss.value(params)),
        spectrum={name: np.asarray(getattr(spectrum, field)) for name, field in (
            ("eigenvalues", "values"), ("residuals", "residuals"), ("estimates", "estimates"),
            ("converged", "converged"),
        )},
        surface=surface,
    )


def keep(
    folder: pathlib.Path, model: str, rounds: int, loss: curvature.DataLoss, found: Outcome
) -> None:
    """Leaves what was measured in the run folder, where the report finds it."""
    what = {"run": str(folder), "model": model, "split": "train", "examples": loss.examples,
            "round": rounds}
    place = f"{model}_round{rounds}_train{loss.examples}"
    results.save(folder / "curvature" / f"{place}_lanczos{TOP}", found.spectrum, what | {
        "top": TOP, "loss": found.last_loss, **analysis.of_eigenvalues(found.spectrum)})
    if found.surface:
        name = f"surface_{place}_{SURFACE_POINTS}x{SURFACE_POINTS}_r1_s1"
        results.save(folder / "landscape" / name, found.surface._asdict(), what | {
            "radius": 1.0, "points": SURFACE_POINTS, "seed": 1})


def row(label: str, found: list[Outcome]) -> list[str]:
    """A line of the table."""
    columns = (
        ("{:.2f} ± {:.2f}", [o.accuracy for o in found]),
        ("{:.3f} ± {:.3f}", [o.loss for o in found]),
        ("{:.2f} ± {:.2f}", [o.eigenvalues[0] for o in found]),
        ("{:.2f} ± {:.2f}", [o.eigenvalues[0] / o.eigenvalues[4] for o in found]),
    )
    return [label, *(f.format(np.mean(v), np.std(v)) for f, v in columns)]


def demo_config(
    sharpness: str, rho: float, average: str, *, rounds: int, seed: int
) -> ml_collections.ConfigDict:
    """One run of the demo."""
    config = experiment.default_config()
    config.rounds, config.seed = rounds, seed
    config.partition.alpha = 0.0
    config.cohort.size = 2
    config.client.sharpness, config.client.rho = sharpness, rho
    config.server.average, config.server.swa.cycle = average, 5
    config.eval.every, config.eval.window = 5, WINDOW
    config.checkpoint.every = 100
    return experiment.only_used(config)
