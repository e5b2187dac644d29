"""Federated methods, one short file each: a file that exports METHOD is found by itself."""

import importlib
import pkgutil

from fedjax_flat.algorithms.addition import Addition, Beside, added, beside, with_term
from fedjax_flat.algorithms.base import (
    Algorithm,
    Exchange,
    Reply,
    Uploads,
    combine,
    difference,
    replies,
    without_traffic,
    zeros,
)
from fedjax_flat.algorithms.compressed import compressed
from fedjax_flat.algorithms.method import METHODS, Method, Parts, add_methods
from fedjax_flat.algorithms.personal import personal
from fedjax_flat.algorithms.private import private
from fedjax_flat.algorithms.robust import foolsgold, robust
from fedjax_flat.algorithms.secure import secure
from fedjax_flat.algorithms.submodels import submodels

for _found in pkgutil.iter_modules(__path__):
    _module = importlib.import_module(f"{__name__}.{_found.name}")
    if hasattr(_module, "METHOD"):
        add_methods(_module.METHOD)
        globals()[_found.name] = getattr(_module, _found.name)  # the factory, not its module

__all__ = [
    "METHODS", "Addition", "Algorithm", "Beside", "Exchange", "Method", "Parts", "Reply", "Uploads",
    "add_methods", "added", "beside", "combine", "compressed", "difference", "foolsgold",
    "personal", "private", "replies", "robust", "secure", "submodels", "with_term",
    "without_traffic", "zeros",
]
