"""Every method by name: what it is, and how it is made from the parts of an experiment."""

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_collections
import optax

from fedjax_flat.algorithms.adabest import adabest
from fedjax_flat.algorithms.base import Algorithm
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
from fedjax_flat.client import Client


class Parts(NamedTuple):
    """What a method is put together from; `config` is the whole experiment's."""

    client: Client
    server_optimizer: optax.GradientTransformation
    learning_rate: Any
    rho: Any
    config: ml_collections.ConfigDict

    @property
    def settings(self) -> ml_collections.ConfigDict:
        """config.algorithm."""
        return self.config.algorithm


class Method(NamedTuple):
    """What a name means."""

    summary: str
    paper: str  # first author and year; the whole reference is in the method's file
    make: Callable[[Parts], Algorithm]
    gradients: int = 1  # per local step, before SAM or ASAM doubles them
    optimizer: str = "any"  # on the server: any, one by name, or `own`: none can be chosen
    sharpness: str = "any"  # on clients: any, sam (if none is chosen), or `own`, or `no steps`


def _shared(parts: Parts) -> dict[str, Any]:
    return {"weighting": parts.settings.weighting}


def _fedopt(parts: Parts) -> Algorithm:
    return fedavg(parts.client, parts.server_optimizer, **_shared(parts))


def _scaffold(parts: Parts) -> Algorithm:
    return scaffold(
        parts.client, parts.server_optimizer, learning_rate=parts.learning_rate,
        **parts.settings.scaffold, **_shared(parts),
    )


def _fedcm(parts: Parts) -> Algorithm:
    return fedcm(
        parts.client, parts.server_optimizer, learning_rate=parts.learning_rate,
        **parts.settings.fedcm, **_shared(parts),
    )


def _mime(lite: bool) -> Callable[[Parts], Algorithm]:
    return lambda parts: mime(
        parts.client, parts.server_optimizer, lite=lite, **parts.settings.mime, **_shared(parts)
    )


def _fedgloss(naive: bool) -> Callable[[Parts], Algorithm]:
    def make(parts):
        s, client = parts.settings.fedgloss, parts.config.client
        early = client.rho_warmup if s.variant == "released" else 0
        return fedgloss(
            parts.client, radius=Radius(s.rho, client.rho, early), beta=s.beta, duals=s.duals,
            naive=naive, measured=s.measured, variant=s.variant, **_shared(parts),
        )

    return make


METHODS: dict[str, Method] = {
    "fedavg": Method("weighted mean of locally trained models", "McMahan 2017", _fedopt),
    "fedsgd": Method(
        "one full gradient per client, one server step", "McMahan 2017",
        lambda p: fedsgd(p.client, p.server_optimizer, **_shared(p)), sharpness="no steps",
    ),
    "fedavgm": Method(
        "momentum on the server", "Hsu 2019", _fedopt, optimizer="sgd with momentum"
    ),
    "fedadam": Method("Adam on the server", "Reddi 2021", _fedopt, optimizer="adam"),
    "fedadagrad": Method(
        "Adagrad on the server", "Reddi 2021", _fedopt, optimizer="adagrad"
    ),
    "fedyogi": Method("Yogi on the server", "Reddi 2021", _fedopt, optimizer="yogi"),
    "fedprox": Method(
        "clients stay near the global model", "Li 2020",
        lambda p: fedavg(p.client, p.server_optimizer, **p.settings.fedprox, **_shared(p)),
    ),
    "scaffold": Method("control variates against drift", "Karimireddy 2020", _scaffold),
    "feddyn": Method(
        "dynamic regularisation, a dual per client", "Acar 2021",
        lambda p: feddyn(p.client, **p.settings.feddyn, **_shared(p)), optimizer="own",
    ),
    "adabest": Method(
        "bias estimates that forget", "Varno 2022",
        lambda p: adabest(p.client, **p.settings.adabest, **_shared(p)), optimizer="own",
    ),
    "mime": Method(
        "MimeLite with variance reduction", "Karimireddy 2021",
        _mime(lite=False), gradients=2,
    ),
    "mimelite": Method(
        "the server's momentum on clients", "Karimireddy 2021", _mime(lite=True)
    ),
    "fedcm": Method("the last direction in every local step", "Xu 2021", _fedcm),
    "fedacg": Method(
        "a look-ahead model, and clients near it", "Kim 2024",
        lambda p: fedacg(p.client, **p.settings.fedacg, **_shared(p)), optimizer="own",
    ),
    "mofedsam": Method("FedCM with SAM", "Qu 2022", _fedcm, sharpness="sam"),
    "fedspeed": Method(
        "prox-correction, a gradient that looks ahead", "Sun 2023",
        lambda p: fedspeed(p.client, rho=p.rho, **p.settings.fedspeed, **_shared(p)),
        gradients=2, optimizer="own", sharpness="own",
    ),
    "fedgamma": Method("SCAFFOLD with SAM", "Dai 2023", _scaffold, sharpness="sam"),
    "fedsmoo": Method(
        "duals on models and on perturbations", "Sun 2023",
        lambda p: fedsmoo(p.client, rho=p.rho, **p.settings.fedsmoo, **_shared(p)),
        gradients=2, optimizer="own", sharpness="own",
    ),
    "fedgloss": Method(
        "SAM on the server, ascent from the last round", "Caldarola 2025",
        _fedgloss(naive=False), optimizer="own",
    ),
    "naivefedgloss": Method(
        "SAM on the server, ascent by an exchange", "Caldarola 2025",
        _fedgloss(naive=True), optimizer="own",
    ),
    "fedgh": Method(
        "conflicting updates projected off each other", "Zhang 2023",
        lambda p: fedgh(p.client, p.server_optimizer, **p.settings.fedgh, **_shared(p)),
    ),
}
