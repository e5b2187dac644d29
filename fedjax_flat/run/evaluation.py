"""What models score while they are trained, as records for metrics.jsonl.

On the evaluated splits; and on what each client has, its `own` train examples and its
`local_test` examples: personal models always, all others if `eval.clients` asks. There the loss
and the score are over all clients' units (the weighted mean accuracy of the personalisation
literature), and how they are spread over clients is

    fairness.worst, .p10, .median, .p90, .deviation    of the clients' scores

(Caldarola 2024, figures 4.2 and 4.3, has each client's score and output norm by round: these go
to clients.jsonl.)
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from fedjax_flat import experiment
from fedjax_flat.engine.round import TrainState
from fedjax_flat.tasks import Sums, Task

QUANTILES = {"worst": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9}


def of_splits(
    built: experiment.Experiment, state: TrainState, done: int
) -> Iterator[dict[str, Any]]:
    """One record per model and split."""
    for model, variables in built.models(state).items():
        for split, examples in built.splits.items():
            means = built.task.means(built.evaluate(variables, examples))
            yield {"round": done, "split": split, "model": model, **ordered(built.task, means)}


def of_clients(
    built: experiment.Experiment, state: TrainState, done: int
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(record, every client's values) per model and part of the clients' examples."""
    measures = {}
    if built.config.eval.clients:
        measures = {
            name: functools.partial(built.evaluate_clients, variables, ())
            for name, variables in built.models(state).items()
        }
    if built.evaluate_personal:
        measures["personal"] = functools.partial(
            built.evaluate_personal, state.server, state.clients
        )
    for model, measure in measures.items():
        for part in built.parts:
            sums = built.over_clients(measure, part)
            where = {"round": done, "split": part, "model": model}
            whole, each = summary(built.task, sums)
            yield where | whole, where | each


def summary(task: Task, sums: Sums) -> tuple[dict[str, float], dict[str, list[float | None]]]:
    """(over all clients, of each client) from sums with clients first; None for one without."""
    pooled = ordered(task, task.means(jax.tree.map(lambda x: x.sum(0), sums)))
    each = jax.vmap(task.means)(sums)
    there = np.asarray(sums["units"]) > 0
    scores = np.asarray(each[task.score], float)[there]
    spread = {f"fairness.{name}": float(np.quantile(scores, q)) for name, q in QUANTILES.items()}
    spread["fairness.deviation"] = float(scores.std())
    values = {"score": each[task.score], "loss": each["loss"]}
    if "output_norm" in sums:
        values["output_norm"] = sums["output_norm"] / np.maximum(sums["outputs"], 1)
    rounded = lambda x: [round(float(v), 6) if t else None for v, t in zip(x, there, strict=True)]
    return pooled | spread, {name: rounded(np.asarray(x)) for name, x in values.items()}


def ordered(task: Task, means: dict[str, Any]) -> dict[str, float]:
    """Loss and score first, then what else the task reports."""
    first = ("loss", task.score)
    names = [*first, *(name for name in means if name not in first)]
    return {name: float(means[name]) for name in names}
