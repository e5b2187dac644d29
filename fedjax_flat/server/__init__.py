"""What happens after the uploads."""

from fedjax_flat.server.averaging import Average, swa, swa_cycle, wima
from fedjax_flat.server.optimizers import ADAPTIVE, adaptive, sgd

__all__ = ["ADAPTIVE", "Average", "adaptive", "sgd", "swa", "swa_cycle", "wima"]
