"""Where examples come from: name -> arrays, one file per family.

Importing this package fills `SOURCES`.
"""

from fedjax_flat.data.sources import arrays as _arrays  # noqa: F401
from fedjax_flat.data.sources import camvid as _camvid  # noqa: F401
from fedjax_flat.data.sources import celeba as _celeba  # noqa: F401
from fedjax_flat.data.sources import cifar as _cifar  # noqa: F401
from fedjax_flat.data.sources import corridor as _corridor  # noqa: F401
from fedjax_flat.data.sources import driving as _driving  # noqa: F401
from fedjax_flat.data.sources import femnist as _femnist  # noqa: F401
from fedjax_flat.data.sources import heart as _heart  # noqa: F401
from fedjax_flat.data.sources import images as _images  # noqa: F401
from fedjax_flat.data.sources import landmarks as _landmarks  # noqa: F401
from fedjax_flat.data.sources import mapillary as _mapillary  # noqa: F401
from fedjax_flat.data.sources import mnist as _mnist  # noqa: F401
from fedjax_flat.data.sources import omniglot as _omniglot  # noqa: F401
from fedjax_flat.data.sources import shakespeare as _shakespeare  # noqa: F401
from fedjax_flat.data.sources import stackoverflow as _stackoverflow  # noqa: F401
from fedjax_flat.data.sources import synthetic_streets as _synthetic_streets  # noqa: F401
from fedjax_flat.data.sources import targets as _targets  # noqa: F401
from fedjax_flat.data.sources import tfds as _tfds  # noqa: F401
from fedjax_flat.data.sources.base import (
    DATA_VARIABLE,
    SOURCES,
    Dataset,
    Examples,
    Source,
    check_labels,
    count_of,
    data_folder,
    from_arrays,
    load,
)
from fedjax_flat.data.sources.digits import digits
from fedjax_flat.data.sources.places import check_places

__all__ = [
    "DATA_VARIABLE", "SOURCES", "Dataset", "Examples", "Source", "check_labels", "check_places",
    "count_of", "data_folder", "digits", "from_arrays", "load",
]
