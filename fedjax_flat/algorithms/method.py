"""What a paper's file says about itself: METHOD, and all that is said about it anywhere.

A file exports `METHOD`, one `Method` or a tuple of them; its docstring has the papers and the
equations. `algorithms/__init__.py` finds the file; a user's own goes through `ff.register.method`.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import optax

from fedjax_flat import errors
from fedjax_flat.algorithms.addition import Addition
from fedjax_flat.algorithms.base import Algorithm
from fedjax_flat.client import Client
from fedjax_flat.models import Model
from fedjax_flat.registry import Registry
from fedjax_flat.settings import Settings


class Parts(NamedTuple):
    """What a method is put together from."""

    client: Client
    server_optimizer: optax.GradientTransformation
    learning_rate: Any  # of the clients: a number, or a function of the round
    rho: Any  # of the clients' ascent: a number, or a function of the round
    sharpness: Callable[[Any], optax.GradientTransformation | None]  # that ascent, by its rho
    weighting: str
    settings: Mapping[str, Any]  # the method's own
    config: Any  # the whole experiment's
    clusters: int = 1  # of clients of like styles, for a method that has `styles`


class Method(NamedTuple):
    """What a name means: an algorithm, or an addition to any (and by itself, to FedAvg)."""

    name: str
    paper: str  # first author and year; the whole reference is in the method's file
    summary: str
    make: Callable[[Parts], Algorithm] | None = None
    settings: Settings = MappingProxyType({})
    group: str = ""  # config.algorithm.GROUP holds the settings; by default its own name
    gradients: int = 1  # per local step, before SAM or ASAM doubles them
    optimizer: str = "any"  # on the server: any, one by name, or `own`: none can be chosen
    client_optimizer: str = "any"  # or `sgd`, where equations count on its steps
    sharpness: str = "any"  # on clients: any, sam, asam (if none is chosen), own, none, `no steps`
    add: Callable[[Mapping[str, Any]], Addition] | None = None  # instead of make: goes with others
    unlabelled: bool = False  # the server learns from data.unlabelled
    labelled: bool = False  # from data.labelled, beside clients whose local steps are its own
    # Of a cohort: clients; groups in sequence (config.groups); one `chain` of all; or clients by
    # `clusters`, which are config.groups.
    members: str = "clients"
    styles: bool = False  # clients are in clusters by style (experiment/by_style.py)
    # (model, settings) -> what is trained and tested in its place
    network: Callable[[Model, Mapping[str, Any]], Model] | None = None
    weighs: bool = True  # whether clients count by algorithm.weighting, and wire.* encodes uploads

    @property
    def section(self) -> str:
        """Where its settings are in config.algorithm."""
        return self.group or self.name

    @property
    def equations(self) -> str:
        """The docstring of its file."""
        module = sys.modules.get((self.make or self.add).__module__)
        return inspect.cleandoc((module.__doc__ if module else None) or "")


METHODS: Registry[Method] = Registry("algorithm")


def add_methods(methods: Method | tuple[Method, ...]) -> None:
    """Registers what a file exports as METHOD."""
    for method in (methods,) if isinstance(methods, Method) else methods:
        for other in METHODS.values():
            if other.section == method.section and dict(other.settings) != dict(method.settings):
                raise errors.UsageError(
                    f"algorithm {method.name!r} shares the settings of {other.name!r} "
                    f"(algorithm.{method.section}) but has others. Leave group out, or share them."
                )
        METHODS.add(method.name, method)
