"""Figures and pages as functions: `ff.plot.compare(["runs/a", "runs/b"], "curves.pdf")`.

A path's suffix says its format: .png, .pdf, .svg and what else matplotlib writes; of `interactive`
and `report`, .html. Seeds of one run are one curve (report/groups.py). `surface`, `plane`, `line`
and `spectrum` draw what `ff.landscape` and `ff.curvature` compute.
"""

import os
import pathlib
from collections.abc import Sequence

from fedjax_flat.report import figures, groups
from fedjax_flat.report.figures import curvature_curves, score_curves
from fedjax_flat.report.page import report
from fedjax_flat.report.pictures import interactive, line, plane, spectrum, surface

__all__ = [
    "compare", "curvature_curves", "interactive", "line", "plane", "report", "score_curves",
    "spectrum", "surface",
]


def compare(
    runs: Sequence[str | os.PathLike], path: str | os.PathLike, *, split: str = "test",
    alike: int = 1,
) -> pathlib.Path:
    """The curves of run folders: score and drift by round, and by what was sent if that differs."""
    found = groups.grouped([groups.read(run) for run in runs])
    return figures.score_curves(
        {group.label: group.records for group in found}, path, split=split, alike=alike
    )
