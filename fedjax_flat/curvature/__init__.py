"""How flat a loss is: Hessian products, spectra and sharpness, of any loss over any data."""

from fedjax_flat.curvature import sharpness
from fedjax_flat.curvature.data_loss import (
    DataLoss,
    data_loss,
    from_nnx,
    of_client,
    of_examples,
)
from fedjax_flat.curvature.spectrum import (
    Density,
    Found,
    Operator,
    Spectrum,
    density,
    flat_hessian,
    lanczos,
    power_iteration,
    trace,
)

__all__ = [
    "DataLoss", "Density", "Found", "Operator", "Spectrum", "data_loss", "density", "flat_hessian",
    "from_nnx", "lanczos", "of_client", "of_examples", "power_iteration", "sharpness", "trace",
]
