"""What a run's features are worth: ridge regression on them, in closed form (table 3.10 of Fani's
thesis).

The classifier of a trained model is left out, its network frozen, and Fed3R solved on what the
network says of all clients' train examples. Its test accuracy, beside the model's own, says how far
classes can be told apart by the features, linearly, or on random features of them. Features are
computed once and cached (experiment/features.py).
"""

import json
import os
from collections.abc import Sequence
from typing import Any

import jax

from fedjax_flat import errors, experiment
from fedjax_flat.models import Variables
from fedjax_flat.run.restore import TrainedRun, load_run
from fedjax_flat.run.run_folder import write_atomically


def probe(
    run: str | os.PathLike,
    *,
    ridge: float = 0.01,
    random: Sequence[int] = (),
    sigma: float = 1000.0,
    model: str = "global",
    data_dir: str | os.PathLike | None = None,
) -> dict[str, Any]:
    """Test accuracies: of the run's model, of Fed3R, of Fed3R-RF with each number in `random`."""
    for count in random:
        errors.at_least("--random", count, 1)
    trained = load_run(run, data_dir)
    found = {"run": str(run), "model": model, "round": int(trained.state.round)}
    variables = trained.model(model)
    found["classifier"] = _accuracy(trained.experiment, variables)
    for count in (0, *random):
        built = _on_features(trained, variables, ridge, count, sigma, data_dir)
        found[f"fed3r_rf {count}" if count else "fed3r"] = _accuracy(built, solved(built))
    of = "".join(f"_{count}" for count in random) + f"_sigma{sigma:g}" * bool(random)
    name = f"{model}_round{found['round']}_ridge{ridge:g}{of}.json"
    path = trained.folder.path / "probe" / name
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, json.dumps(found, indent=2) + "\n")
    return found


def solved(built: experiment.Experiment) -> Variables:
    """The model of a closed form after every client took part once; nothing is written."""
    state = built.over.replicate(built.init())
    step = jax.jit(built.step, donate_argnums=0)
    for _ in range(built.config.rounds):
        clients = built.cohort_of(state.key, state.round).clients
        state, info = step(state, built.data_of(jax.device_get(clients)))
        if not bool(info.finite):
            raise errors.UsageError(f"the probe is not finite. {built.algorithm.advice}")
    return built.models(state)["global"]


def _on_features(trained: TrainedRun, variables, ridge, count, sigma, data_dir):
    """Fed3R on features by the run's network, of the same clients."""
    config = trained.folder.config()
    clients, cohort = trained.experiment.data.num_clients, config.cohort.size
    config.algorithm.name = "fed3r"
    config.algorithm.fed3r.ridge = ridge
    config.model.random.features, config.model.random.sigma = count, sigma
    config.cohort.sampling, config.rounds = "once", -(-clients // cohort)
    config.server.average, config.curvature.every, config.client.frozen = "none", 0, "none"
    config.eval.splits = ("test",)
    already = config.data.features
    config.data.features = True
    return experiment.build(
        experiment.only_used(config), data_dir, extractor=None if already else variables
    )


def _accuracy(built: experiment.Experiment, variables: Variables) -> float:
    examples = built.split("test")
    return float(built.task.means(built.evaluate(variables, examples))[built.task.score])
