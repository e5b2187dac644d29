"""What happens after the uploads."""

from fedjax_flat.server.optimizers import OPTIMIZERS

__all__ = ["OPTIMIZERS"]
