"""Curves and bars of groups of runs as plotly has them: plain dictionaries, which the page draws.

Every trace says of which group it is (`meta`), by which it has its colour and by which the page's
legend hides it. Deviations over seeds are bands. Numbers have five digits.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_flat.report import curves
from fedjax_flat.report.groups import Group
from fedjax_flat.run import metrics

# Ten colours that hold on white and on black, then the same again, darker.
_TEN = ("#4269d0", "#ef8b18", "#3ca951", "#e0455a", "#a463f2", "#2aa7a1", "#d6569e", "#97844e",
        "#6f9bf0", "#8d939e")
DASHES = ("solid", "dash", "dot", "dashdot")


class Chart(NamedTuple):
    """What plotly draws, with a title and a note above and below."""

    title: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    note: str = ""
    kind: str = "plain"  # wide | solid: in three dimensions

    @property
    def drawn(self) -> dict[str, Any]:
        """For the page."""
        return {"data": self.data, "layout": self.layout}


def color(i: int) -> str:
    """Of group i."""
    base = _TEN[i % len(_TEN)]
    if i < len(_TEN):
        return base
    parts = (int(base[k : k + 2], 16) for k in (1, 3, 5))
    return "#" + "".join(f"{round(0.65 * x):02x}" for x in parts)


def dash_of(models: Sequence[str], model: str) -> str:
    """Of a model's curves."""
    return DASHES[list(models).index(model) % len(DASHES)]


def by_round(
    groups: Sequence[Group],
    title: str,
    *,
    select: Callable[[Group], Sequence[dict[str, str]]],
    axis: str = "round",
    scale: float = 1.0,
    y: str = "",
    dashes: Sequence[str] = ("global",),
    smooth: bool = False,
    note: str = "",
) -> Chart | None:
    """Mean curves with bands over seeds; `select` says which of a group's; None if there are none.

    A run without that axis is left out.
    """
    data: list[dict[str, Any]] = []
    longest: list[float] = []
    ends: set[int] = set()
    for i, group in enumerate(groups):
        in_phases = metrics.phase_ends(group.runs[0].records) if axis == "round" else {}
        for selection in select(group):
            rounds, mean, deviation = curves.mean_curve(group.records, **selection)
            x = curves.along(group.records, axis, rounds)
            if x is None or not len(x):
                continue
            if smooth:
                mean = curves.smooth(mean)
            mean, deviation = scale * mean, scale * deviation
            chosen = curves.thin(mean)
            x, mean, deviation = x[chosen], mean[chosen], deviation[chosen]
            longest.append(float(x[-1]))
            ends |= set(list(in_phases.values())[:-1])
            model = selection.get("model", "global")
            name = group.label + (f" ({model})" if len(dashes) > 1 and model != "local" else "")
            if len(group.runs) > 1 and not smooth:
                data.append(_band(i, x, mean - deviation, mean + deviation))
            data.append({
                "type": "scatter", "mode": "lines" if len(x) > 1 else "markers", "name": name,
                "x": numbers(x), "y": numbers(mean), "meta": i, "line": {
                    "color": color(i), "width": 2,
                    "dash": dash_of(dashes, model) if model in dashes else "solid",
                },
            })
    if not data:
        return None
    wide = axis != "round" and max(longest) > 20 * min(longest) > 0
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": curves.AXES[axis]}, **({"type": "log"} if wide else {})},
        "yaxis": {"title": {"text": y or title}},
    }
    if ends:
        layout["shapes"] = [
            {"type": "line", "x0": end, "x1": end, "yref": "paper", "y0": 0, "y1": 1,
             "line": {"dash": "dot", "width": 1, "color": "#888"}} for end in sorted(ends)
        ]
        note = " ".join(filter(None, [note, "Dotted: where one phase ends and the next begins."]))
    return Chart(title, data, layout, note)


def _band(i: int, x: np.ndarray, low: np.ndarray, high: np.ndarray) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "lines", "x": numbers(np.concatenate([x, x[::-1]])),
        "y": numbers(np.concatenate([high, low[::-1]])), "fill": "toself", "fillcolor": color(i),
        "opacity": 0.18, "line": {"width": 0}, "hoverinfo": "skip", "meta": i,
    }


def bars(
    groups: Sequence[Group], title: str, values: Sequence[dict[str, float] | None], y: str
) -> Chart | None:
    """A bar per name and group."""
    data = [
        {"type": "bar", "name": group.label, "x": list(found), "y": numbers(list(found.values())),
         "meta": i, "marker": {"color": color(i)}}
        for i, (group, found) in enumerate(zip(groups, values, strict=True)) if found
    ]
    layout = {"barmode": "group", "yaxis": {"title": {"text": y}}, "xaxis": {"type": "category"}}
    return Chart(title, data, layout, kind="wide") if data else None


def heat(
    title: str, z: np.ndarray, *, x: Sequence, x_title: str, y_title: str, bar: str,
    y: Sequence | None = None, note: str = "", limits: tuple[float, float] | None = None,
) -> Chart:
    """Rows upwards from the first, columns to the right."""
    trace: dict[str, Any] = {
        "type": "heatmap", "z": [numbers(row) for row in z], "x": list(x), "colorscale": "Viridis",
        "colorbar": {"title": {"text": bar, "side": "right"}, "thickness": 12},
    }
    if y is not None:
        trace["y"] = list(y)
    if limits:
        trace |= {"zmin": limits[0], "zmax": limits[1]}
    layout = {"xaxis": {"title": {"text": x_title}}, "yaxis": {"title": {"text": y_title}}}
    return Chart(title, [trace], layout, note)


def numbers(values: Any) -> list[float | int | None]:
    """With five digits; what is not finite is nothing."""
    array = np.asarray(values)
    if array.dtype.kind in "iu":
        return array.tolist()
    return [float(f"{v:.5g}") if np.isfinite(v) else None for v in array.astype(float).tolist()]
