"""Many runs of one question: methods, settings to choose among, seeds; each cell a run folder."""

from fedjax_flat.sweep.driver import Outcome, run
from fedjax_flat.sweep.engines import ENGINES
from fedjax_flat.sweep.plan import Cell, Sweep, load

__all__ = ["ENGINES", "Cell", "Outcome", "Sweep", "load", "run"]
