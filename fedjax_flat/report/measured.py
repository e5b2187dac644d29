"""What analyses left in run folders, as charts: spectra, surfaces, planes, lines, pictures."""

import base64
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
# A little to the right of the middle, or the name of the loss's axis would be cut off.
_CAMERA = {"center": {"x": 0.2, "y": -0.2, "z": -0.1}, "eye": {"x": 2.1, "y": 1.7, "z": 1.0}}
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
            label = _label(group, run)
            for place in (run.folder, *run.folder.phases):
                inside = place.path / folder
                for path in sorted(inside.glob("*.npz")) if inside.is_dir() else ():
                    if re.fullmatch(pattern, path.stem) and (one := results.read(path)):
                        phase = "" if place is run.folder else f"/{place.path.name}"
                        found.append(Found(i, run, label + phase, *one))
    return found


def spectra(groups: Sequence[Group]) -> tuple[list[dict[str, str]], list[Chart]]:
    """(rows of a table, charts) of Hessian eigenvalues, means over seeds; and of densities."""
    found = saved(groups, "curvature", r".+_(lanczos|power)\d+.*")
    alike: dict[tuple, list[Found]] = {}
    for f in found:
        phase = f.label.removeprefix(_label(groups[f.group], f.run))
        kind = (f.what["model"], f.what["round"], f.what["split"], len(f.arrays["eigenvalues"]))
        alike.setdefault((f.group, phase, *kind), []).append(f)
    rows, stems = [], []
    for seeds in alike.values():
        first = seeds[0]
        label = first.label if len(seeds) == 1 else groups[first.group].label
        rows.append(_row(label, seeds))
        values = np.array([f.arrays["eigenvalues"] for f in seeds])
        done = np.all([f.arrays["converged"] for f in seeds], axis=0)
        stem: dict[str, Any] = {
            "type": "scatter", "mode": "lines+markers", "name": _named(first, label),
            "meta": first.group, "x": list(range(1, values.shape[1] + 1)),
            "y": numbers(values.mean(0)), "line": {"color": color(first.group), "width": 1},
            "marker": {"size": 8, "symbol": ["circle" if d else "circle-open" for d in done]},
        }
        if len(seeds) > 1:
            stem["error_y"] = {"type": "data", "array": numbers(values.std(0)), "thickness": 1}
        stems.append(stem)
    most = max((len(stem["x"]) for stem in stems), default=0)
    axes = {"xaxis": {"title": {"text": "rank"}, "dtick": 1 if most <= 20 else None},
            "yaxis": {"title": {"text": "eigenvalue"}}}
    charts = [Chart("Largest Hessian eigenvalues", stems, axes,
                    "Bars: deviation over seeds. Hollow: not converged.")] if stems else []
    lines = [_density(f) for f in found if "nodes" in f.arrays]
    if lines:
        charts.append(Chart("Spectral density", lines, {
            "xaxis": {"title": {"text": "eigenvalue"}},
            "yaxis": {"type": "log", "title": {"text": "density"}, "exponentformat": "power"},
        }, "Smoothed by a Gaussian of a hundredth of the spectrum's width."))
    return rows, charts


def _row(label: str, seeds: Sequence[Found]) -> dict[str, str]:
    """Of a table of spectra; mean and deviation over seeds."""
    what = seeds[0].what

    def of(name: str) -> str:
        values = [f.what[name] for f in seeds if f.what.get(name) is not None]
        if len(values) < len(seeds):
            return ""
        spread = f" ± {np.std(values):.2g}" if len(seeds) > 1 else ""
        return f"{np.mean(values):.4g}{spread}"

    converged, asked = (sum(f.what[name] for f in seeds) for name in ("converged", "top"))
    return {
        "run": label, "seeds": str(len(seeds)), "model": what["model"],
        "round": str(what["round"]), "examples": f"{what['examples']} {what['split']}",
        "loss": of("loss"), "λ₁": of("lambda_1"), "λ₁/λ₅": of("lambda_1/lambda_5"),
        "trace": of("trace"), "converged": f"{converged} of {asked}",
    }


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
                            "camera": _CAMERA}}
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
            label = _label(group, run)
            for place in (run.folder, *run.folder.phases):
                for path in sorted(place.path.glob("*/*.png")):
                    drawn_here = path.parent.name in ("curvature", "landscape")
                    if not drawn_here and not re.fullmatch(_REDRAWN, path.name):
                        yield path, label


def _label(group: Group, run: Run) -> str:
    """'avg_0', or 'avg/seed0', of several seeds."""
    name = pathlib.Path(run.path).resolve().name
    if len(group.runs) == 1:
        return group.label
    return name if name.startswith(group.label) else f"{group.label}/{name}"


def _known(groups: Sequence[Group], path: str) -> str:
    """The label of a run that an analysis names."""
    name = pathlib.Path(path).resolve()
    return next((g.label for g in groups for r in g.runs
                 if pathlib.Path(r.path).resolve() == name), "/".join(name.parts[-2:]))


def _named(f: Found, label: str = "") -> str:
    where = "" if f.what["split"] == "train" else f", {f.what['split']}"
    return f"{label or f.label}, {f.what['model']}, round {f.what['round']}{where}"


def _of(f: Found) -> str:
    return f"Of {f.what['examples']} {f.what['split']} examples"
