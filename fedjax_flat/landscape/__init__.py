"""Pictures of a loss: random surfaces, planes through models, lines between them."""

from fedjax_flat.landscape.directions import Plane, filter_normalised, plane
from fedjax_flat.landscape.grid import (
    Grid,
    Line,
    check_points,
    grid,
    line,
    plane_axes,
    symmetric,
)

__all__ = [
    "Grid", "Line", "Plane", "check_points", "filter_normalised", "grid", "line", "plane",
    "plane_axes", "symmetric",
]
