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

from fedjax_flat import experiment, parts
from fedjax_flat.engine.round import TrainState
from fedjax_flat.models import Clusters
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
            if not isinstance(variables, Clusters)
        }
    if built.evaluate_personal:
        measures["personal"] = functools.partial(
            built.evaluate_personal, state.server, state.clients
        )
    for model, measure in measures.items():
        for name in built.parts:
            sums = built.over_clients(measure, name)
            where = {"round": done, "split": name, "model": model}
            whole, each = summary(built.task, sums)
            if model == "personal" and (size := head_floats(built)) is not None:
                whole["head_floats"] = size
            yield where | whole, where | each


def head_floats(built: experiment.Experiment) -> float | None:
    """Numbers in a client's classifier, over all clients: d C, or d C_k of a pruned one."""
    variables = jax.eval_shape(built.task.init, jax.random.key(0))
    kernels = [x.shape for name, x in parts.take(variables, parts.head).items() if x.ndim == 2]
    if len(kernels) != 1:
        return None
    (features, classes), = kernels
    if built.classes is not None and built.data.classes is not None:
        classes = built.classes.sum(axis=1).mean()
    return float(features * classes)


def of_classes(
    built: experiment.Experiment, state: TrainState, done: int
) -> Iterator[dict[str, Any]]:
    """Some clients' personal models on the test split: classes that they have, and that they lack.

    Means over classes, then over clients (figure 4.7 of Fani's thesis).
    """
    if built.evaluate_classes is None or built.classes is None:
        return
    count, clients = built.config.eval.absent, built.data.num_clients
    chosen = np.arange(clients if count < 0 else min(count, clients), dtype=np.int32)
    place = built.over.replicate(jax.device_put(chosen))
    found = jax.device_get(built.evaluate_classes(
        state.server, state.clients, built.data_of([0]), place, built.splits["test"]
    ))
    pooled = ordered(built.task, built.task.means(jax.tree.map(lambda x: x.sum(0), found["sums"])))
    has = built.classes[chosen]
    groups = {"local_classes": has, "absent_classes": ~has}
    means = {name: mean_of_classes(found, group) for name, group in groups.items()}
    whole = {name: float(np.mean(x)) for name, x in means.items() if x.size}
    yield {"round": done, "split": "test", "model": "personal", **pooled, **whole}


def mean_of_classes(found: dict[str, np.ndarray], group: np.ndarray) -> np.ndarray:
    """Mean over a group of classes of the accuracy of each, for every client that has any."""
    tested = group & (found["examples"] > 0)
    accuracy = found["right"] / np.maximum(found["examples"], 1)
    number = tested.sum(axis=1)
    sums = np.where(tested, accuracy, 0).sum(axis=1)
    return sums[number > 0] / number[number > 0]


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
