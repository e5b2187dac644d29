"""The registered methods as a table: what each sends, keeps and computes, from its own shapes."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_flat import errors, experiment
from fedjax_flat.algorithms import METHODS
from fedjax_flat.engine.round import traffic
from fedjax_flat.report import tables

GRADIENTS_OF_SAM = 2


def describe(name: str) -> dict[str, Any]:
    """One method. Traffic and state are in models, per client and round, per client, per server."""
    method = METHODS[name]
    with _silence():
        built = _on_a_network_for(name)
    state = jax.eval_shape(built.init)
    model = _floats(jax.eval_shape(built.algorithm.models, state.server)["global"])
    sent = traffic(built.algorithm, state, built.data_of([0]))
    ascends = method.sharpness in ("sam", "asam")
    gradients = method.gradients * (GRADIENTS_OF_SAM if ascends else 1)
    return {
        "name": name,
        "summary": method.summary,
        "paper": method.paper,
        "models_down": sent.down / (32 * model),
        "models_up": sent.up / (32 * model),
        "exchanges": len(built.algorithm.exchanges),
        "gradients_per_step": 0 if method.sharpness == "no steps" else gradients,
        "client_state": _floats(state.clients) / model / built.data.num_clients,
        "server_state": _floats(state.server) / model,
        "server_optimizer": method.optimizer,
        "client_sharpness": method.sharpness,
        "client_optimizer": method.client_optimizer,
        "settings": {
            f"algorithm.{method.section}.{name}": {"default": s.default, "range": s.range,
                                                   "doc": s.doc}
            for name, s in method.settings.items()
        },
    }


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """What is said while an experiment is built that nobody will run."""
    logger = logging.getLogger("fedjax_flat")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _on_a_network_for(name: str) -> experiment.Experiment:
    """The method on what it takes: a plain network, normalisation, convolutions, a clock."""
    for options in (
        {}, {"model.norm": "batch"}, {"model.name": "resnet20"}, {"clock.speed": "constant(1)"}
    ):
        config = experiment.default_config()
        config.algorithm.name = name
        config.data.unlabelled = 0.1 * METHODS[name].unlabelled
        config.data.labelled = "0.1" if METHODS[name].labelled else "none"
        config.update_from_flattened_dict(options)
        try:
            return experiment.build(config)
        except errors.UsageError as e:
            refused = e
    raise refused


def overview() -> str:
    """All methods, one line each."""
    rows = []
    for name in METHODS:
        d = describe(name)
        rows.append(
            [
                name,
                f"{_short(d['models_down'])} {_short(d['models_up'])}",
                str(d["gradients_per_step"]),
                f"{_short(d['client_state'])} {_short(d['server_state'])}",
                d["summary"],
                d["paper"],
            ]
        )
    header = ["method", "sent", "grads", "kept", "what it is", "paper"]
    return tables.table(header, rows, left=(0, 4, 5)) + (
        "\n\nsent: models down and up per client and round; grads: gradients per local step (SAM\n"
        "and ASAM double them); kept: models between rounds, per client and on the server.\n"
        "SWA and WIMA go with all."
    )


def page(name: str) -> str:
    """All about one method: its paper and equations, settings, traffic and state."""
    d = describe(name)
    method = METHODS[name]
    lines = [f"{name}: {d['summary']} ({d['paper']})", "", method.equations, ""]
    if d["settings"]:
        rows = [[n, str(s["default"]), s["range"], s["doc"]] for n, s in d["settings"].items()]
        header = ["setting (--config.)", "default", "range", "what it is"]
        lines += [tables.table(header, rows, left=(0, 1, 2, 3)), ""]
    else:
        lines += ["settings: none of its own", ""]
    about = facts(name, d)
    width = max(map(len, about))
    lines += [f"{name.ljust(width)}  {text}" for name, text in about.items()]
    return "\n".join(lines)


def facts(name: str, d: dict[str, Any]) -> dict[str, str]:
    """What `describe` found about a method, in words."""
    method = METHODS[name]
    servers = {"own": "its own step", "any": "any (server.optimizer)"}
    ascents = {"own": "its own, of radius client.rho", "any": "any (client.sharpness)",
               "none": "none: its steps are others", "no steps": "none: clients take no steps"}
    return {
        "sent": f"{d['models_down']:.3g} models down, {d['models_up']:.3g} up, per client and "
                f"round, in {d['exchanges']} exchange{'s' * (d['exchanges'] > 1)}",
        "kept": f"{d['client_state']:.3g} models per client, {d['server_state']:.3g} on the server",
        "gradients": f"{d['gradients_per_step']} per local step",
        "server": servers.get(method.optimizer, method.optimizer),
        "ascent": ascents.get(method.sharpness, f"{method.sharpness}, if none is chosen"),
        "client": {"any": "any optimiser (client.optimizer)"}.get(
            method.client_optimizer, method.client_optimizer),
    }


def _short(models: float) -> str:
    """Two digits after the point, if there are any; none from 10 on."""
    return f"{models:.0f}" if models >= 10 else f"{models:.2f}".rstrip("0").rstrip(".")


def _floats(tree: Any) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(x.size for x in leaves if jnp.issubdtype(x.dtype, jnp.floating) and x.ndim)
