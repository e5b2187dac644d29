"""Curvature and landscapes of run folders: computed, written beside the run, drawn.

Results are written whole (results.py). What was stopped goes on: eigenvalues after the last product
(journal.py), a surface or a plane with the rows that are missing. What is finished is not computed
again; files are named by all that they are of, the round too, so that none takes another's place.
"""

import contextlib
import itertools
import json
import logging
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_flat import curvature, errors, landscape, progress
from fedjax_flat.curvature import DataLoss
from fedjax_flat.disk import write_atomically
from fedjax_flat.models import Variables
from fedjax_flat.report import groups, pictures, results
from fedjax_flat.report.journal import Journal
from fedjax_flat.run import flatness
from fedjax_flat.run.restore import TrainedRun, load_run

logger = logging.getLogger("fedjax_flat")
METHODS: dict[str, Callable[..., curvature.Spectrum]] = {
    "lanczos": lambda operator, top, **options: curvature.lanczos(
        operator, top, vectors=min(top, 5), **options  # as many residuals, a product each
    ),
    "power": curvature.power_iteration,
}


def loss_of(
    trained: TrainedRun,
    split: str,
    examples: int = 0,
    *,
    client: int | None = None,
    stats: Any = (),
    precision: str = "float32",
) -> DataLoss:
    """The run's own loss on the first `examples` of a split, 0 for all, without weight decay.

    Split `own` is all the data of `client`.
    """
    built = trained.experiment
    errors.at_least("--examples", examples, 0)
    if split == "own":
        if client is None:
            raise errors.UsageError("split own is the data of one client: say which, --client K.")
        return curvature.of_client(
            built.task, built.data_of([client]), client, stats=stats, precision=precision
        )
    return curvature.of_examples(
        built.task, built.split(split), stats=stats, limit=examples or None, precision=precision
    )


def model_of(trained: TrainedRun, model: str, client: int | None) -> tuple[str, Variables]:
    """A trained model with its name, or the one that `client` makes of the global."""
    if client is None:
        return model, trained.model(model)
    ((_, made),) = flatness.client_models(trained.experiment, trained.state, [client])
    return f"client{client}", made


def spectrum(
    run: str,
    *,
    top: int = 5,
    split: str = "train",
    examples: int = 0,
    model: str = "global",
    client: int | None = None,
    method: str = "lanczos",
    precision: str = "float32",
    trace_probes: int = 0,
    density_probes: int = 0,
    data_dir: str | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Eigenvalues (and trace, and density, with probes) of a run's model."""
    solve = errors.lookup("method", method, METHODS)
    wide = errors.lookup("precision", precision, {"float32": False, "float64": True})
    errors.seed("--seed", seed)
    errors.at_least("--examples", examples, 0)
    if split == "own" and examples:
        raise errors.UsageError(
            f"--examples {examples} would change nothing: split own is all the data of a client."
        )
    trained = load_run(run, data_dir)
    label, variables = model_of(trained, model, client)
    with jax.enable_x64(wide), contextlib.ExitStack() as stack:
        params, stats = jax.tree.map(lambda w: jnp.asarray(w, precision), variables)
        loss = loss_of(
            trained, split, examples, client=client, stats=stats, precision=precision
        )
        operator = curvature.flat_hessian(loss, params)
        key = jax.random.key(seed)
        done = int(trained.state.round)
        name = f"{label}_round{done}_{split}{loss.examples}_{method}{top}" + "_float64" * wide
        base = results.named(trained.folder.path / "curvature", name + f"_seed{seed}" * bool(seed))
        summary: dict[str, Any] = {
            "run": str(run), "model": label, "split": split, "examples": loss.examples,
            "weight_decay": False, "method": method, "precision": precision, "seed": seed,
            "round": done, "top": top, "loss": float(loss.value(params)),
        }
        if not np.isfinite(summary["loss"]):
            raise errors.UsageError(f"the loss of {run} is {summary['loss']}: it has no curvature.")
        stack.enter_context(results.locked(base))
        journal = Journal(base, summary, operator.size, precision)
        if finished := _finished(base, summary):
            logger.info("the eigenvalues of %s are there: %s", run, base)
            summary, arrays = finished
        else:
            found = solve(
                operator, top, key=key, start=journal.start, after_step=journal.append,
                progress=_bar(f"{method} {errors.printable(pathlib.Path(run).name)}"),
            )
            arrays = {
                "eigenvalues": found.values, "residuals": found.residuals,
                "estimates": found.estimates, "converged": found.converged,
            }
            summary |= {"products": found.products, **of_eigenvalues(arrays)}
        if trace_probes and summary.get("trace_probes") != trace_probes:
            mean, error = curvature.trace(
                operator, key=key, probes=trace_probes, progress=_bar("trace")
            )
            summary |= {
                "trace": mean, "trace_standard_error": error, "trace_probes": trace_probes
            }
        if density_probes and summary.get("density_probes") != density_probes:
            density = curvature.density(
                operator, key=key, probes=density_probes, progress=_bar("density")
            )
            arrays |= {"nodes": density.nodes, "weights": density.weights}
            summary["density_probes"] = density_probes
        results.save(base, arrays, summary)
        journal.delete()
    summary["figure"] = str(pictures.spectrum(arrays, summary, results.suffixed(base, ".png")))
    return summary


def of_eigenvalues(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """What tables say of a spectrum."""
    values = arrays["eigenvalues"]
    found = {"converged": int(arrays["converged"].sum()), "lambda_1": float(values[0]),
             "residual_1": float(arrays["residuals"][0])}
    if len(values) >= 5:
        found |= {"lambda_5": float(values[4]), "lambda_1/lambda_5": float(values[0] / values[4])}
    return found


def _finished(
    base: pathlib.Path, summary: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """A spectrum that was computed before, of the very same model and examples."""
    found = results.read(results.suffixed(base, ".npz"), otherwise="computed again")
    if found is None:
        return None
    before = {name: found[0].get(name) for name in summary}
    same = before | {"run": summary["run"]} == summary  # from wherever the folder is named
    return (found[0] | {"run": summary["run"]}, found[1]) if same else None


def local_curvature(
    run: str, clients: int, *, examples: int = 0, data_dir: str | None = None
) -> list[dict[str, Any]]:
    """lambda_1 of local models on their own and on all data: one row per client, then the global.

    The models are those with which the first `clients` clients (-1: all) would end the next round.
    """
    if clients != -1:
        errors.at_least("--clients", clients, 1)
    errors.at_least("--examples", examples, 0)
    trained = load_run(run, data_dir)
    built = trained.experiment
    whole = lambda model: loss_of(trained, "train", examples, stats=model.stats)
    chosen = flatness.chosen_clients(built, clients)
    models = flatness.client_models(built, trained.state, chosen)
    rows = []
    for client, model in _bar("clients", total=len(chosen))(models):
        own = loss_of(trained, "own", client=client, stats=model.stats)
        rows.append({
            "model": f"client {client}", "examples": own.examples,
            "lambda_1, own data": flatness.of_model(own, model.params)["lambda_1"],
            "lambda_1, all data": flatness.of_model(whole(model), model.params)["lambda_1"],
        })
    model = trained.model()
    everything = whole(model)
    rows.append({
        "model": "global", "examples": everything.examples, "lambda_1, own data": None,
        "lambda_1, all data": flatness.of_model(everything, model.params)["lambda_1"],
    })
    done = int(trained.state.round)
    name = f"clients{len(chosen)}_round{done}_train{everything.examples}.json"
    path = trained.folder.path / "curvature" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(rows, indent=2) + "\n")
    return rows


def surfaces(
    runs: list[str],
    *,
    points: int = 21,
    radius: float = 1.0,
    split: str = "train",
    examples: int = 0,
    model: str = "global",
    client: int | None = None,
    data_dir: str | None = None,
    seed: int = 0,
) -> list[str]:
    """A surface around each run's model, along the same random directions; paths of figures.

    With `client`, around the model which that client makes of the global one, on the client's own
    data and on `split`.
    """
    axis = landscape.symmetric(radius, points)
    errors.seed("--seed", seed)
    grids, made = {}, []
    titles = dict(zip(runs, groups.unique_paths(runs), strict=True))
    parts = [split] if client is None else ["own", split]
    for run, part in itertools.product(runs, parts):
        trained = load_run(run, data_dir)
        label, (params, stats) = model_of(trained, model, client)
        loss = loss_of(trained, part, examples, client=client, stats=stats)
        keys = jax.random.split(jax.random.key(seed))
        directions = tuple(landscape.filter_normalised(k, params) for k in keys)
        done = int(trained.state.round)
        name = (f"surface_{label}_round{done}_{part}{loss.examples}_{points}x{points}_r{radius:g}"
                f"_s{seed}")
        base = results.named(trained.folder.path / "landscape", name)
        what = {
            "run": str(run), "model": label, "split": part, "examples": loss.examples,
            "radius": radius, "points": points, "seed": seed, "round": done,
        }
        title = titles[run]
        title += "" if client is None else f", client {client}, {part} data"
        grids[title] = _grid(base, what, loss, params, directions, axis, axis, title)
        drawn = {title: grids[title]}
        made.append(str(pictures.surface(drawn, results.suffixed(base, ".png"))))
        made.append(str(pictures.interactive(grids[title], results.suffixed(base, ".html"))))
    if len(grids) > 1:
        of = results.digest([list(grids), made])
        together = pathlib.Path(runs[0]) / "landscape" / f"surfaces_side_by_side_{of}.png"
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
    landscape.check_points(points)
    trained = [load_run(run, data_dir) for run in runs]
    made = landscape.plane(*(t.model(model).params for t in trained))
    loss = loss_of(trained[0], split, examples, stats=shared_stats(trained, model))
    x, y = landscape.plane_axes(made, points)
    what = {
        "runs": [str(r) for r in runs], "model": model, "split": split,
        "examples": loss.examples, "coordinates": made.points.tolist(), "points": points,
        "rounds": [int(t.state.round) for t in trained],
    }
    base = _between("plane", trained, what)
    grid = _grid(base, what, loss, made.origin, (made.u, made.v), x, y, "plane")
    places = dict(zip(groups.unique_paths(runs), made.points, strict=True))
    return [str(pictures.plane(grid, places, results.suffixed(base, ".png")))]


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
    landscape.check_points(points)
    trained = [load_run(run, data_dir) for run in runs]
    loss = loss_of(trained[0], split, examples, stats=shared_stats(trained, model))
    found = landscape.line(
        loss, *(t.model(model).params for t in trained), points=points, margin=0.2
    )
    what = {
        "runs": [str(r) for r in runs], "model": model, "split": split,
        "examples": loss.examples, "points": points,
        "rounds": [int(t.state.round) for t in trained],
    }
    base = _between("line", trained, what)
    results.save(base, found._asdict(), what | {"barrier": found.barrier})
    labels = groups.unique_paths(runs)
    return found.barrier, [str(pictures.line(found, labels, results.suffixed(base, ".png")))]


def _between(kind: str, trained: list[TrainedRun], what: dict[str, Any]) -> pathlib.Path:
    """The path of results about several runs: their names, and a digest of all that they are of."""
    places = [os.path.abspath(t.folder.path) for t in trained]
    of = results.digest([places, {name: v for name, v in what.items() if name != "runs"}])
    names = "_".join(t.folder.path.name for t in trained)
    name = f"{kind}_{names}_{what['split']}{what['examples']}"
    return results.named(trained[0].folder.path / "landscape", f"{name[:150]}_{of}")


def shared_stats(trained: list[TrainedRun], model: str) -> Any:
    """None: between models with statistics of their own, nobody says which hold."""
    stats = [t.model(model).stats for t in trained]
    if any(jax.tree.leaves(s) for s in stats):
        raise errors.UsageError(
            "a plane or a line through models with BatchNorm: their statistics differ, and those "
            "in between are not known. Use --surface, or a model with GroupNorm."
        )
    return ()


def _grid(base, what, loss, params, directions, x, y, label) -> landscape.Grid:
    """A grid that is saved after every row, and that goes on from such a file."""
    with results.locked(base):
        saved = results.load(base, what)
        start = landscape.Grid(*(saved[f] for f in landscape.Grid._fields)) if saved else None
        keep = lambda done: results.save(base, done._asdict(), what)
        return landscape.grid(
            loss, params, directions, x, y, start=start, progress=_bar(label), after_row=keep
        )


def _bar(label: str, total: int | None = None):
    return lambda steps: progress.bar(steps, what=label, total=total)
