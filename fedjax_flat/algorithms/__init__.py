"""Federated methods, one short file each."""

from fedjax_flat.algorithms.adabest import adabest
from fedjax_flat.algorithms.base import Algorithm, ClientResult, Exchange, Uploads
from fedjax_flat.algorithms.fedacg import fedacg
from fedjax_flat.algorithms.fedavg import fedavg
from fedjax_flat.algorithms.fedcm import fedcm
from fedjax_flat.algorithms.feddyn import feddyn
from fedjax_flat.algorithms.fedgh import fedgh
from fedjax_flat.algorithms.fedgloss import Radius, fedgloss
from fedjax_flat.algorithms.fedsgd import fedsgd
from fedjax_flat.algorithms.fedsmoo import fedsmoo
from fedjax_flat.algorithms.fedspeed import fedspeed
from fedjax_flat.algorithms.mime import mime
from fedjax_flat.algorithms.scaffold import scaffold

__all__ = [
    "Algorithm", "ClientResult", "Exchange", "Radius", "Uploads", "adabest", "fedacg", "fedavg",
    "fedcm", "feddyn", "fedgh", "fedgloss", "fedsgd", "fedsmoo", "fedspeed", "mime", "scaffold",
]
