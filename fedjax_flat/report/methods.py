"""The registered methods as a table: what each sends, keeps and computes, from its own shapes."""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_flat import experiment
from fedjax_flat.algorithms.registry import METHODS
from fedjax_flat.config import default_config
from fedjax_flat.engine.round import floats_per_client
from fedjax_flat.report import tables

GRADIENTS_OF_SAM = 2


def describe(name: str) -> dict[str, Any]:
    """One method. Traffic and state are in models, per client and round, per client, per server."""
    method = METHODS[name]
    config = default_config()
    config.algorithm.name = name
    built = experiment.build(config)
    state = jax.eval_shape(built.init)
    model = _floats(state.pseudo_gradient)
    down, up = floats_per_client(built.algorithm, state, built.data)
    gradients = method.gradients * (GRADIENTS_OF_SAM if method.sharpness == "sam" else 1)
    return {
        "name": name,
        "summary": method.summary,
        "paper": method.paper,
        "models_down": down / model,
        "models_up": up / model,
        "exchanges": len(built.algorithm.exchanges),
        "gradients_per_step": 0 if method.sharpness == "no steps" else gradients,
        "client_state": _floats(state.clients) / model / built.data.num_clients,
        "server_state": _floats(state.server) / model,
        "server_optimizer": method.optimizer,
        "client_sharpness": method.sharpness,
    }


def overview() -> str:
    """All methods, one line each."""
    rows = []
    for name in METHODS:
        d = describe(name)
        rows.append(
            [
                name,
                f"{d['models_down']:g} {d['models_up']:g}",
                str(d["gradients_per_step"]),
                f"{d['client_state']:g} {d['server_state']:g}",
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


def _floats(tree: Any) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(x.size for x in leaves if jnp.issubdtype(x.dtype, jnp.floating) and x.ndim)
