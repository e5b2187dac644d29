"""What analyses left in run folders, as charts: spectra, surfaces, planes, lines, pictures."""

import base64
import json
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_flat.curvature import Density
from fedjax_flat.landscape import Grid
from fedjax_flat.report import pictures, results
from fedjax_flat.report.charts import Chart, color, numbers
from fedjax_flat.report.groups import Group, Run

_REDRAWN = r"(score|curvature|clients_.+)\.png"  # the page has these itself
MOST_PICTURES = 2_000_000  # bytes of them on a page


class Found(NamedTuple):
    """A result of a run."""

    group: int
    run: Run
    label: str  # of the group; of several seeds, with the folder's name
    what: dict[str, Any]
    arrays: dict[str, np.ndarray]


def saved(groups: Sequence[Group], folder: str, pattern: str) -> list[Found]:
    """Sound results in a folder of the runs, or of their phases."""
    found = []
    for i, group in enumerate(groups):
        for run in group.runs:
            label = group.label if len(group.runs) == 1 else f"{group.label}/{_last(run)}"
            for place in (run.folder, *run.folder.phases):
                inside = place.path / folder
                for path in sorted(inside.glob("*.npz")) if inside.is_dir() else ():
                    if re.fullmatch(pattern, path.stem) and (one := results.read(path)):
                        phase = "" if place is run.folder else f"/{place.path.name}"
                        found.append(Found(i, run, label + phase, *one))
    return found


def spectra(groups: Sequence[Group]) -> tuple[list[dict[str, str]], list[Chart]]:
    """(rows of a table, charts) of Hessian eigenvalues and densities."""
    found = saved(groups, "curvature", r".+_(lanczos|power)\d+.*")
    rows = []
    for f in found:
        ratio, trace = f.what.get("lambda_1/lambda_5"), f.what.get("trace")
        error = f.what.get("trace_standard_error", 0)
        rows.append({
            "run": f.label, "model": f.what["model"], "round": str(f.what["round"]),
            "examples": f"{f.what['examples']} {f.what['split']}", "loss": f"{f.what['loss']:.4g}",
            "λ₁": f"{f.what['lambda_1']:.4g}", "λ₁/λ₅": "" if ratio is None else f"{ratio:.3g}",
            "trace": "" if trace is None else f"{trace:.4g} ± {error:.2g}",
            "converged": f"{f.what['converged']} of {f.what['top']}",
        })
    stems = [
        {"type": "scatter", "mode": "lines+markers", "name": _named(f), "meta": f.group,
         "x": list(range(1, len(f.arrays["eigenvalues"]) + 1)),
         "y": numbers(f.arrays["eigenvalues"]), "line": {"color": color(f.group), "width": 1},
         "marker": {"size": 8, "symbol": [
             "circle" if done else "circle-open" for done in f.arrays["converged"].tolist()
         ]}}
        for f in found
    ]
    axes = {"xaxis": {"title": {"text": "rank"}, "dtick": 1 if _most(stems) <= 20 else None},
            "yaxis": {"title": {"text": "eigenvalue"}}}
    charts = [Chart("Largest Hessian eigenvalues", stems, axes,
                    "Hollow: not converged.")] if stems else []
    lines = [_density(f) for f in found if "nodes" in f.arrays]
    if lines:
        charts.append(Chart("Spectral density", lines, {
            "xaxis": {"title": {"text": "eigenvalue"}},
            "yaxis": {"type": "log", "title": {"text": "density"}, "exponentformat": "power"},
        }, "Smoothed by a Gaussian of a hundredth of the spectrum's width."))
    return rows, charts


def _density(f: Found) -> dict[str, Any]:
    density = Density(f.arrays["nodes"], f.arrays["weights"])
    low, high = density.nodes.min(), density.nodes.max()
    width = 0.01 * (high - low)
    grid = np.linspace(low - 5 * width, high + 5 * width, 300)
    mean, _ = density.on(grid, width)
    return {"type": "scatter", "mode": "lines", "name": _named(f), "meta": f.group,
            "x": numbers(grid), "y": numbers(np.maximum(mean, 1e-6)),
            "line": {"color": color(f.group), "width": 2}}


def surfaces(groups: Sequence[Group]) -> list[Chart]:
    """To turn with the mouse, on one scale."""
    found = saved(groups, "landscape", "surface_.+")
    if not found:
        return []
    scale = pictures.scale_of([f.arrays["loss"] for f in found])
    charts = []
    for i, f in enumerate(found):
        grid = Grid(*(f.arrays[name] for name in Grid._fields))
        shown = np.minimum(grid.loss, scale.highest).T
        trace = {
            "type": "surface", "x": numbers(grid.x), "y": numbers(grid.y),
            "z": [numbers(row) for row in shown],
            "customdata": [numbers(row) for row in grid.loss.T], "colorscale": "Viridis",
            "cmin": scale.lowest, "cmax": scale.highest, "showscale": True, "meta": f.group,
            "colorbar": {"thickness": 12, "len": 0.8, "title": {"text": "loss", "side": "right"}},
            "hovertemplate": "x %{x:.2f}, y %{y:.2f}<br>loss %{customdata:.4g}<extra></extra>",
        }
        axis = {"range": [scale.lowest, scale.highest], "title": {"text": "loss"}}
        layout = {"scene": {"zaxis": axis, "xaxis": {"title": {"text": "x"}},
                            "yaxis": {"title": {"text": "y"}}, "aspectmode": "cube",
                            "camera": {"eye": {"x": 1.8, "y": 1.8, "z": 1.0}}}}
        note = f"{_of(f)}, radius {f.what['radius']:g}, round {f.what['round']}."
        charts.append(Chart(f"{f.label}, {f.what['model']} model", [trace], layout,
                            f"{note} {scale.said}" if not i else note, "solid"))
    return charts


def planes(groups: Sequence[Group]) -> list[Chart]:
    """The loss on planes, with the models; and along lines, with the barrier."""
    charts = []
    for f in saved(groups, "landscape", "plane_.+"):
        loss = f.arrays["loss"]
        scale = pictures.scale_of([loss], 95)
        trace = {"type": "contour", "x": numbers(f.arrays["x"]), "y": numbers(f.arrays["y"]),
                 "z": [numbers(row) for row in np.minimum(loss, scale.highest).T],
                 "colorscale": "Viridis", "ncontours": 25, "contours": {"coloring": "heatmap"},
                 "line": {"width": 0.5},
                 "colorbar": {"title": {"text": "loss", "side": "right"}, "thickness": 12}}
        places = np.array(f.what["coordinates"])
        names = [_known(groups, run) for run in f.what["runs"]]
        marks = {"type": "scatter", "mode": "markers+text", "text": names, "hoverinfo": "text",
                 "x": numbers(places[:, 0]), "y": numbers(places[:, 1]),
                 "textposition": "top center", "cliponaxis": False,
                 "textfont": {"color": "white", "shadow": "0 0 3px #000"},
                 "marker": {"color": "white", "size": 9, "line": {"color": "black", "width": 1}}}
        layout = {"xaxis": {"title": {"text": "x"}, "constrain": "domain"},
                  "yaxis": {"title": {"text": "y"}, "scaleanchor": "x", "constrain": "domain"}}
        charts.append(Chart("Loss on the plane through " + ", ".join(names[:3]), [trace, marks],
                            layout, f"{_of(f)}. {scale.said}".strip()))
    for f in saved(groups, "landscape", "line_.+"):
        first, second = (_known(groups, run) for run in f.what["runs"])
        trace = {"type": "scatter", "mode": "lines", "x": numbers(f.arrays["x"]),
                 "y": numbers(f.arrays["loss"]), "line": {"color": color(f.group), "width": 2}}
        charts.append(Chart(
            f"Loss between {first} and {second}", [trace],
            {"xaxis": {"title": {"text": f"0: {first}, 1: {second}"}},
             "yaxis": {"title": {"text": "loss"}}},
            f"{_of(f)}. Barrier {f.what['barrier']:.4g}.",
        ))
    return charts


def images(groups: Sequence[Group]) -> Iterator[tuple[str, str]]:
    """(caption, data URL) of other pictures in the run folders, until there are too many."""
    size = 0
    for path, label in _other_pictures(groups):
        content = path.read_bytes()
        size += len(content)
        if size > MOST_PICTURES:
            yield f"{label}: {path.name} and what follows would make the page too large", ""
            return
        yield (f"{label}: {path.parent.name}/{path.name}",
               f"data:image/png;base64,{base64.b64encode(content).decode()}")


def _other_pictures(groups: Sequence[Group]) -> Iterator[tuple[pathlib.Path, str]]:
    for group in groups:
        for run in group.runs:
            label = group.label if len(group.runs) == 1 else f"{group.label}/{_last(run)}"
            for place in (run.folder, *run.folder.phases):
                for path in sorted(place.path.glob("*/*.png")):
                    drawn_here = path.parent.name in ("curvature", "landscape")
                    if not drawn_here and not re.fullmatch(_REDRAWN, path.name):
                        yield path, label


def commands(run: Run) -> list[dict[str, str]]:
    """Every command that worked in the folder, with its time."""
    try:
        return json.loads(run.folder.environment_file.read_bytes())["commands"]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _last(run: Run) -> str:
    return pathlib.Path(run.path).resolve().name


def _known(groups: Sequence[Group], path: str) -> str:
    """The label of a run that an analysis names."""
    name = pathlib.Path(path).resolve()
    return next((g.label for g in groups for r in g.runs
                 if pathlib.Path(r.path).resolve() == name), "/".join(name.parts[-2:]))


def _named(f: Found) -> str:
    where = "" if f.what["split"] == "train" else f", {f.what['split']}"
    return f"{f.label}, {f.what['model']}, round {f.what['round']}{where}"


def _of(f: Found) -> str:
    return f"Of {f.what['examples']} {f.what['split']} examples"


def _most(traces: list[dict[str, Any]]) -> int:
    return max((len(trace["x"]) for trace in traces), default=0)
