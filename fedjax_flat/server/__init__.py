"""What happens after the uploads."""

from fedjax_flat.server.averaging import Average, swa, swa_cycle, wima
from fedjax_flat.server.optimizers import OPTIMIZERS

__all__ = ["OPTIMIZERS", "Average", "swa", "swa_cycle", "wima"]
