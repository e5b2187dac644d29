"""Curvature and landscapes of run folders: computed, written beside the run, drawn.

Results are written whole, `.npz` for the arrays, `.json` for what they are of; a surface or a plane
that was stopped goes on with the rows that are missing.
"""

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import tqdm

from fedjax_flat import curvature, errors, landscape
from fedjax_flat.curvature import DataLoss
from fedjax_flat.engine.restore import TrainedRun, load_run
from fedjax_flat.engine.run_folder import write_atomically
from fedjax_flat.report import pictures

METHODS: dict[str, Callable[..., curvature.Spectrum]] = {
    "lanczos": curvature.lanczos, "power": curvature.power_iteration
}


def loss_of(trained: TrainedRun, split: str, examples: int) -> DataLoss:
    """The run's own loss on the first `examples` of a split, 0 for all, without weight decay."""
    built = trained.experiment
    data = errors.lookup("split", split, {**built.splits, "train": built.data.examples})
    return curvature.of_examples(built.objective, data, limit=examples or None)


def spectrum(
    run: str,
    *,
    top: int = 5,
    split: str = "train",
    examples: int = 0,
    model: str = "global",
    method: str = "lanczos",
    trace_probes: int = 0,
    density_probes: int = 0,
    data_dir: str | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Eigenvalues (and trace, and density, with probes) of a run's model."""
    solve = errors.lookup("method", method, METHODS)
    trained = load_run(run, data_dir)
    loss = loss_of(trained, split, examples)
    operator = curvature.flat_hessian(loss, trained.model(model))
    key = jax.random.key(seed)
    name = f"{model}_{split}{loss.examples}_{method}{top}"

    found = solve(operator, top, key=key, progress=_bar(f"{method} {pathlib.Path(run).name}"))
    arrays = {
        "eigenvalues": found.values, "residuals": found.residuals, "converged": found.converged
    }
    summary = {
        "run": str(run), "model": model, "split": split, "examples": loss.examples,
        "weight_decay": False, "method": method, "round": int(trained.state.round),
        "lambda_1": float(found.values[0]), "products": found.products,
        "converged": int(found.converged.sum()), "top": top,
        "loss": float(loss.value(trained.model(model))),
    }
    if top >= 5:
        summary["lambda_5"] = float(found.values[4])
        summary["lambda_1/lambda_5"] = float(found.values[0] / found.values[4])
    if trace_probes:
        summary["trace"], summary["trace_standard_error"] = curvature.trace(
            operator, key=key, probes=trace_probes, progress=_bar("trace")
        )
    if density_probes:
        density = curvature.density(
            operator, key=key, probes=density_probes, progress=_bar("density")
        )
        arrays |= {"nodes": density.nodes, "weights": density.weights}
    base = trained.folder.path / "curvature" / name
    save(base, arrays, summary)
    summary["figure"] = str(pictures.spectrum(arrays, summary, _suffixed(base, ".png")))
    return summary


def surfaces(
    runs: list[str],
    *,
    points: int = 21,
    radius: float = 1.0,
    split: str = "train",
    examples: int = 0,
    model: str = "global",
    data_dir: str | None = None,
    seed: int = 0,
) -> list[str]:
    """A surface around each run's model, along the same random directions; paths of figures."""
    axis = landscape.symmetric(radius, points)
    grids, made = {}, []
    for run in runs:
        trained = load_run(run, data_dir)
        loss, params = loss_of(trained, split, examples), trained.model(model)
        keys = jax.random.split(jax.random.key(seed))
        directions = tuple(landscape.filter_normalised(k, params) for k in keys)
        name = f"surface_{model}_{split}{loss.examples}_{points}x{points}_r{radius:g}_s{seed}"
        base = trained.folder.path / "landscape" / name
        what = {
            "run": str(run), "model": model, "split": split, "examples": loss.examples,
            "radius": radius, "points": points, "seed": seed, "round": int(trained.state.round),
        }
        grid = _grid(base, what, loss, params, directions, axis, axis, pathlib.Path(run).name)
        grids[pathlib.Path(run).name] = grid
        made.append(str(pictures.surface({pathlib.Path(run).name: grid}, _suffixed(base, ".png"))))
        made.append(str(pictures.interactive(grid, _suffixed(base, ".html"))))
    if len(runs) > 1:
        together = pathlib.Path(runs[0]) / "landscape" / "surfaces_side_by_side.png"
        made.append(str(pictures.surface(grids, together)))
    return made


def plane(
    runs: list[str],
    *,
    points: int = 21,
    split: str = "train",
    examples: int = 0,
    model: str = "global",
    data_dir: str | None = None,
) -> list[str]:
    """The plane through the models of three runs, further ones projected onto it."""
    if len(runs) < 3:
        raise errors.UsageError(f"a plane goes through three models; {len(runs)} given.")
    trained = [load_run(run, data_dir) for run in runs]
    made = landscape.plane(*(t.model(model) for t in trained))
    loss = loss_of(trained[0], split, examples)
    x, y = landscape.plane_axes(made, points)
    names = [pathlib.Path(run).name for run in runs]
    base = trained[0].folder.path / "landscape" / f"plane_{'_'.join(names)}_{split}{loss.examples}"
    what = {
        "runs": [str(r) for r in runs], "model": model, "split": split,
        "examples": loss.examples, "coordinates": made.points.tolist(), "points": points,
        "rounds": [int(t.state.round) for t in trained],
    }
    grid = _grid(base, what, loss, made.origin, (made.u, made.v), x, y, "plane")
    return [str(pictures.plane(grid, dict(zip(names, made.points, strict=True)),
                               _suffixed(base, ".png")))]


def line(
    runs: list[str],
    *,
    points: int = 21,
    split: str = "train",
    examples: int = 0,
    model: str = "global",
    data_dir: str | None = None,
) -> tuple[float, list[str]]:
    """(barrier, figures) between the models of two runs."""
    if len(runs) != 2:
        raise errors.UsageError(f"a line joins two models; {len(runs)} given.")
    trained = [load_run(run, data_dir) for run in runs]
    loss = loss_of(trained[0], split, examples)
    found = landscape.line(
        loss, *(t.model(model) for t in trained), points=points, margin=0.2
    )
    names = [pathlib.Path(run).name for run in runs]
    base = trained[0].folder.path / "landscape" / f"line_{'_'.join(names)}_{split}{loss.examples}"
    save(base, found._asdict(), {
        "runs": [str(r) for r in runs], "model": model, "split": split,
        "examples": loss.examples, "barrier": found.barrier,
    })
    return found.barrier, [str(pictures.line(found, names, _suffixed(base, ".png")))]


def save(base: pathlib.Path, arrays: dict[str, Any], summary: dict[str, Any]) -> None:
    """`base`.npz and `base`.json, each whole or not at all."""
    base.parent.mkdir(parents=True, exist_ok=True)
    partial = base.with_name(f".partial-{base.name}.npz")
    np.savez(partial, **arrays)
    os.replace(partial, _suffixed(base, ".npz"))
    write_atomically(_suffixed(base, ".json"), json.dumps(summary, indent=2) + "\n")


def _grid(base, what, loss, params, directions, x, y, label) -> landscape.Grid:
    """A grid that is saved after every row, and that goes on from such a file."""
    start, arrays = None, _suffixed(base, ".npz")
    description = _suffixed(base, ".json")
    if arrays.exists() and description.exists() and json.loads(description.read_text()) == what:
        with np.load(arrays, allow_pickle=False) as saved:
            start = landscape.Grid(*(saved[f] for f in landscape.Grid._fields))
    keep = lambda done: save(base, done._asdict(), what)
    return landscape.grid(
        loss, params, directions, x, y, start=start, progress=_bar(label), after_row=keep
    )


def _suffixed(base: pathlib.Path, suffix: str) -> pathlib.Path:
    return base.with_name(base.name + suffix)


def _bar(label: str):
    return lambda steps: tqdm.tqdm(steps, desc=label, dynamic_ncols=True)
