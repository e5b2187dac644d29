"""Figures of spectra and landscapes."""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_flat import disk, errors
from fedjax_flat.curvature import Density
from fedjax_flat.landscape import Grid, Line

ALSO = "FEDJAX_FLAT_FIGURES"  # pdf,svg: formats beside the one that a figure has


def spectrum(arrays: Mapping[str, np.ndarray], summary: Mapping[str, Any], path) -> pathlib.Path:
    """Eigenvalues as stems, hollow where not converged; the density beside them if there is one."""
    dense = "nodes" in arrays
    figure, axes = new_figure(1, 2 if dense else 1, (9 if dense else 5, 3.4))
    values, done = arrays["eigenvalues"], arrays["converged"]
    ranks = np.arange(1, len(values) + 1)
    axes[0].vlines(ranks, 0, values, color="C0", linewidth=1)
    axes[0].plot(ranks[done], values[done], "o", color="C0", markersize=4)
    if not done.all():
        axes[0].plot(ranks[~done], values[~done], "o", color="C0", markersize=4, fillstyle="none",
                     label="not converged")
        legend_below(figure, axes[0], 1)
    axes[0].set(xlabel="rank", ylabel="eigenvalue")
    axes[0].xaxis.get_major_locator().set_params(integer=True)
    if dense:
        density = Density(arrays["nodes"], arrays["weights"])
        low, high = density.nodes.min(), density.nodes.max()
        width = 0.01 * (high - low)
        grid = np.linspace(low - 5 * width, high + 5 * width, 800)
        mean, error = density.on(grid, width)
        axes[1].semilogy(grid, np.maximum(mean, 1e-8), color="C0")
        axes[1].fill_between(grid, np.maximum(mean - 2 * error, 1e-8),
                             np.maximum(mean + 2 * error, 1e-8), alpha=0.25, linewidth=0)
        axes[1].set(xlabel="eigenvalue", ylabel="density", ylim=(1e-6, None))
    figure.suptitle(
        f"{label(summary['run'])}, {summary['model']} model, {summary['examples']} "
        f"{summary['split']} examples", fontsize=10,
    )
    return save(figure, path)


def surface(grids: Mapping[str, Grid], path) -> pathlib.Path:
    """Surfaces of the loss side by side, on one scale, cut off at a common height."""
    figure, axes = new_figure(1, len(grids), (4.2 * len(grids), 3.8), projection="3d")
    draw_surfaces(figure, axes, grids)
    return save(figure, path)


class Scale(NamedTuple):
    """The heights between which losses are drawn, and what to say of those above."""

    lowest: float
    highest: float
    said: str


def scale_of(losses: Sequence[np.ndarray], percentile: float = 90) -> Scale:
    """One scale for all; cut off where walls, a tenth of the points, would hide the valley."""
    lowest = float(min(np.nanmin(x) for x in losses))
    top = float(max(np.nanmax(x) for x in losses))
    cut = float(max(np.nanpercentile(x, percentile) for x in losses))
    if top - lowest <= 2 * (cut - lowest) or cut <= lowest:
        return Scale(lowest, top, "")
    return Scale(lowest, cut, f"Cut off at a loss of {cut:.3g}; the highest is {top:.3g}.")


def draw_surfaces(figure, axes, grids: Mapping[str, Grid]) -> None:
    """One surface per axes, on one scale of heights and colours."""
    scale = scale_of([g.loss for g in grids.values()])
    axes = np.ravel(axes)
    for ax, (label, grid) in zip(axes, grids.items(), strict=True):
        x, y = np.meshgrid(grid.x, grid.y, indexing="ij")
        drawn = ax.plot_surface(
            x, y, np.minimum(grid.loss, scale.highest), cmap="viridis", vmin=scale.lowest,
            vmax=scale.highest, linewidth=0.1, edgecolor="k", rstride=1, cstride=1,
        )
        ax.set(xlabel="x", ylabel="y", zlabel="loss", zlim=(scale.lowest, scale.highest))
        ax.zaxis.labelpad = 8
        ax.set_box_aspect(None, zoom=0.8)
        ax.patch.set_visible(False)  # or it covers the name of its neighbour's last axis
        ax.set_title(shown(label), fontsize=10)
    figure.colorbar(drawn, ax=list(axes), label="loss", shrink=0.6, pad=0.08)
    if scale.said:
        figure.supxlabel(scale.said, fontsize=8)


def interactive(grid: Grid, path) -> pathlib.Path:
    """A surface to turn with the mouse; one file that needs no network."""
    import plotly.graph_objects as go

    figure = go.Figure(
        go.Surface(x=grid.x, y=grid.y, z=grid.loss.T, colorscale="Viridis",
                   customdata=100 * grid.error.T,
                   hovertemplate="x %{x:.2f}, y %{y:.2f}<br>loss %{z:.4f}"
                                 "<br>error %{customdata:.2f} %<extra></extra>")
    )
    figure.update_layout(scene={"zaxis_title": "loss"}, margin={"l": 0, "r": 0, "t": 0, "b": 0})
    path = pathlib.Path(path)
    with disk.whole(path) as partial:
        figure.write_html(partial, include_plotlyjs=True)
    return path


def plane(grid: Grid, models: Mapping[str, np.ndarray], path) -> pathlib.Path:
    """Loss and error on a plane, with the models marked."""
    figure, axes = new_figure(1, 2, (10, 4.2))
    for ax, values, title in zip(
        axes, (grid.loss, 100 * grid.error), ("loss", "error (%)"), strict=True
    ):
        low, high = np.nanmin(values), np.nanpercentile(values, 95)
        levels = np.linspace(low, max(high, low + 1e-6), 25)
        drawn = ax.contourf(grid.x, grid.y, values.T, levels=levels, cmap="viridis", extend="max")
        figure.colorbar(drawn, ax=ax, label=title)
        for name, (x, y) in models.items():
            ax.plot(x, y, "o", color="white", markeredgecolor="black")
            ax.annotate(
                shown(name), (x, y), xytext=(5, 5), textcoords="offset points", color="white"
            )
        ax.set(xlabel="x", ylabel="y", aspect="equal")
    return save(figure, path)


def line(found: Line, names: Sequence[str], path) -> pathlib.Path:
    """Loss and error between two models."""
    figure, (left,) = new_figure(1, 1, (5.5, 3.4))
    left.plot(found.x, found.loss, color="C0")
    first, second = map(shown, names)
    left.set(xlabel=f"0: {first}      1: {second}", ylabel="loss")
    left.yaxis.label.set_color("C0")
    right = left.twinx()
    right.plot(found.x, 100 * found.error, "--", color="C1")
    right.set_ylabel("error (%)", color="C1")
    left.set_title(f"barrier {found.barrier:.4f}", fontsize=10)
    return save(figure, path)


def label(run: str | os.PathLike) -> str:
    """A run's name as matplotlib shows it."""
    return shown(pathlib.Path(run).name)


def shown(name: str) -> str:
    """A name as matplotlib shows it: not as mathematics, not hidden, not too long."""
    name = errors.printable(name).replace("$", r"\$")
    return f" {name}"[name[:1] != "_":][:40]


def legend_below(figure, axes, columns: int) -> None:
    """The legend of some axes, below all of them, where it covers nothing."""
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", frameon=False,
                  ncols=max(1, min(columns, len(names))))


def shade(fraction: float):
    """A colour of a scale of greys and greens, for lines of which none stands out."""
    import matplotlib

    return matplotlib.colormaps["summer"](0.8 * fraction)


def new_figure(rows: int, columns: int, size: tuple[float, float], projection: str | None = None):
    """(figure, axes in a row); no window is opened."""
    figure = empty_figure(size)
    keywords = {"projection": projection} if projection else {}
    axes = figure.subplots(rows, columns, squeeze=False, subplot_kw=keywords).ravel()
    if not projection:
        for ax in axes:
            ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def empty_figure(size: tuple[float, float]):
    """A figure without axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure, path) -> pathlib.Path:
    """Writes the picture, whole or not at all; beside it, in every format of FEDJAX_FLAT_FIGURES.

    In PDF and SVG files text stays text.
    """
    import matplotlib

    path = pathlib.Path(path)
    known = figure.canvas.get_supported_filetypes()
    also = [f".{name.strip().lower()}" for name in os.environ.get(ALSO, "").split(",") if name]
    for suffix in dict.fromkeys([path.suffix, *also]):
        if suffix[1:].lower() not in known:
            said = f"figure {path}" if suffix == path.suffix else f"{ALSO}={os.environ[ALSO]}"
            raise errors.UsageError(
                f"{said}: {suffix or 'a name without a suffix'} is no format of pictures; "
                f"expected one of {', '.join(f'.{name}' for name in sorted(known))}."
            )
        whole = path.with_name(path.name.removesuffix(path.suffix) + suffix)
        try:
            with (
                disk.whole(whole) as partial,
                matplotlib.rc_context({"pdf.fonttype": 42, "svg.fonttype": "none"}),
            ):
                figure.savefig(partial, dpi=150)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, FileExistsError) as e:
            raise errors.UsageError(f"figure {whole} cannot be written: {e.strerror}.") from e
    return path
