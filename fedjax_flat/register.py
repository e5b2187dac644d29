"""A user's own source, partition, shift, model, task, codec or method, one line each.

    ff.register.source("mine", load, side=28)              load([data_dir], side=...)
    ff.register.partition("by_hand", split, share=0.5)     split(dataset, share=...) -> Partition
    ff.register.shift("dusk", make, gain=0.5)              make(dataset, clients, gain=...) -> Shift
    ff.register.model("wide", Wide, width=64)              Wide(num_classes=..., width=...)
    ff.register.task("ranking", make, margin=0.2)          make(model, preprocess, dataset, ...)
    ff.register.codec("halves", make, share=0.5)           make(share=...) -> Codec
    ff.register.method(METHOD)                             see algorithms/method.py

Keywords are settings with their defaults, or `ff.Setting`s with ranges; a config sets them as
`config.model.width` or `--config.model.width=128`. In a file that `--import` names, this is all
that training, resuming and every analysis need to know it by name.
"""

import inspect
from collections.abc import Callable
from typing import Any

from fedjax_flat import errors
from fedjax_flat.algorithms import METHODS, Method, add_methods
from fedjax_flat.data import PARTITIONS, SHIFTS, SOURCES, Source
from fedjax_flat.models import MODELS
from fedjax_flat.registry import Registry, entry
from fedjax_flat.settings import Setting
from fedjax_flat.tasks import TASKS
from fedjax_flat.wire import CODECS

REGISTRIES: tuple[Registry, ...] = (SOURCES, PARTITIONS, SHIFTS, MODELS, TASKS, CODECS, METHODS)


def source(name: str, load: Callable[..., Any], **settings: Any) -> None:
    """A data set: `load(**settings)` or `load(data_dir, **settings)`."""
    takes_folder = len(inspect.signature(load).parameters) > len(settings)
    about = (load.__doc__ or "of your own").strip().split("\n")[0]
    SOURCES.add(name, Source(
        load if takes_folder else lambda data_dir, **given: load(**given), about=about, size="?",
        licence="?", files="?", here=lambda folder: True, settings=_settings(settings),
    ))


def partition(name: str, split: Callable[..., Any], **settings: Any) -> None:
    """Who owns what: `split(dataset, **settings) -> Partition`."""
    from_dataset = lambda dataset, data_dir, **given: split(dataset, **given)
    from_dataset.__doc__ = split.__doc__
    PARTITIONS.add(name, entry(from_dataset, _settings(settings)))


def shift(name: str, make: Callable[..., Any], **settings: Any) -> None:
    """How clients see their examples: `make(dataset, number of clients, **settings) -> Shift`."""
    SHIFTS.add(name, entry(make, _settings(settings)))


def model(name: str, module: Callable[..., Any], **settings: Any) -> None:
    """A network: `module(num_classes=..., **settings)` is a flax module."""
    MODELS.add(name, entry(module, _settings(settings)))


def task(name: str, make: Callable[..., Any], **settings: Any) -> None:
    """What is learned: `make(model, preprocess, dataset, **settings) -> Task`."""
    TASKS.add(name, entry(make, _settings(settings)))


def codec(name: str, make: Callable[..., Any], **settings: Any) -> None:
    """What is sent instead of numbers: `make(**settings) -> Codec`, of config.wire's settings."""
    CODECS.add(name, entry(make, _settings(settings)))


def method(*methods: Method) -> None:
    """Federated methods."""
    for one in methods:
        if not isinstance(one, Method):
            raise errors.UsageError(
                f"register.method({one!r:.60}): expected a fedjax_flat.algorithms.Method."
            )
    add_methods(methods)


def _settings(given: dict[str, Any]) -> dict[str, Setting]:
    return {n: v if isinstance(v, Setting) else Setting(v) for n, v in given.items()}
