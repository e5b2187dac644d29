"""Curvature of the models while they are trained, as records for metrics.jsonl.

lambda_1 (by Lanczos, the largest algebraic eigenvalue) and the trace of the Hessian of the training
loss, without weight decay: of the global and the averaged models on the train split, and of local
models on the train split and on the client's own data.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_flat import curvature, errors, experiment
from fedjax_flat.curvature import DataLoss
from fedjax_flat.engine.round import TrainState
from fedjax_flat.models import Clusters, Variables


def records(built: experiment.Experiment, state: TrainState, done: int) -> Iterator[dict[str, Any]]:
    """One per model, then two per client, as `config.curvature` says."""
    settings = built.config.curvature
    measure = lambda loss, params: of_model(loss, params, settings.depth, settings.trace_probes)
    whole = lambda model: curvature.of_examples(
        built.task, built.train_examples, stats=model.stats, limit=settings.examples or None
    )
    for name, model in built.models(state).items():
        if isinstance(model, Clusters):
            continue
        found = measure(whole(model), model.params)
        yield {"round": done, "split": "train", "model": name, **found}
    for client, model in client_models(built, state, chosen_clients(built, settings.clients)):
        own = curvature.of_client(
            built.task, built.data_of([client]), client, stats=model.stats
        )
        for split, loss in (("own", own), ("train", whole(model))):
            found = measure(loss, model.params)
            yield {"round": done, "split": split, "model": f"client {client}", **found}


def of_model(loss: DataLoss, params: Any, depth: int = 20, trace_probes: int = 0) -> dict[str, Any]:
    """lambda_1, whether it converged, and the trace with its standard error."""
    operator, key = curvature.flat_hessian(loss, params), jax.random.key(0)
    depth = min(depth, operator.size)
    top = curvature.lanczos(operator, 1, key=key, depth=depth, tolerance=1e-2)
    found = {"lambda_1": float(top.values[0]), "converged": bool(top.converged[0])}
    if trace_probes:
        found["trace"], found["trace_error"] = curvature.trace(
            operator, key=key, probes=max(2, trace_probes)
        )
    return found


def chosen_clients(built: experiment.Experiment, count: int) -> list[int]:
    """The first `count` clients that have examples, -1 for all."""
    if built.config.partition.virtual:  # none of them is empty
        present = list(range(built.data.num_clients))
    else:
        present = [k for k, size in enumerate(built.partition.sizes) if size > 0]
    return present if count < 0 else present[:count]


def client_models(
    built: experiment.Experiment, state: TrainState, clients: list[int]
) -> Iterator[tuple[int, Variables]]:
    """(client, the model with which it would end the next round).

    Each client is a cohort of its own, which matters only to methods that exchange twice per round.
    """
    for client in clients:
        if not 0 <= client < built.data.num_clients:
            raise errors.UsageError(
                f"client {client}: expected 0 to {built.data.num_clients - 1}."
            )
        stacked = built.local_models(
            state, built.data_of([client]), jnp.array([client], jnp.int32)
        )
        if not jax.tree.leaves(stacked):
            raise errors.UsageError(
                f"{built.config.algorithm.name} trains no local models, so clients have no "
                "curvature of their own: curvature.clients = 0."
            )
        yield client, jax.tree.map(lambda x: x[0], stacked)
