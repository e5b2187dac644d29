"""CIFAR-10-C and CIFAR-100-C: 19 corruptions of the test images, each in five severities.

Hendrycks and Dietterich, "Benchmarking neural network robustness to common corruptions and
perturbations" (ICLR 2019), with the parameters that they published for images of 32x32
(hendrycks/robustness, make_cifar_c.py). `corrupt` makes them anew, by NumPy, SciPy and Pillow, each
image from a random stream of its own. It differs from the published arrays in its draws, and in:

1. frost, whose ice is drawn (weather.py) instead of cut out of photographs;
2. spatter of water, whose edges and distances are exact where OpenCV's are rounded.

`corrupted` reads the published arrays where they are there.
"""

from fedjax_flat.data.corruptions.published import corrupted, folder_of
from fedjax_flat.data.corruptions.table import CORRUPTIONS, SEVERITIES, corrupt

__all__ = ["CORRUPTIONS", "SEVERITIES", "corrupt", "corrupted", "folder_of"]
