"""The model with which a run starts, where that is another run's.

Of a run that trained the whole network, all of its global model is taken. Of one that was trained
on features (data.features), there is only the classifier: it is taken if the network here, as it
starts, is the one whose features it reads, which the digest of the weights says.
"""

import os
from typing import Any

import jax

from fedjax_flat import errors, parts, rng
from fedjax_flat.experiment import Experiment
from fedjax_flat.experiment.features import weights_digest
from fedjax_flat.models import Variables
from fedjax_flat.run.restore import TrainedRun, load_run


def model_from(
    built: Experiment, run: str | os.PathLike, data_dir: str | os.PathLike | None = None
) -> Variables:
    """The initial model of `built`, with everything that `run`'s global model has."""
    trained = load_run(run, data_dir)
    key = rng.fold(jax.random.key(built.config.seed), "init")
    fresh = jax.jit(built.task.init)(key)
    ours, theirs = (parts.take(v, lambda name: True) for v in (fresh, trained.model()))
    if unknown := sorted(theirs.keys() - ours.keys()):
        raise _refused(run, f"has {unknown[0]} ({len(unknown)} such), which this model lacks")
    for name, leaf in theirs.items():
        if leaf.shape != ours[name].shape:
            raise _refused(run, f"has {name} of shape {leaf.shape}; here it is {ours[name].shape}")
    missing = sorted(ours.keys() - theirs.keys())
    _check_features(built, trained, fresh, missing)
    return parts.put(fresh, theirs)


def _check_features(built: Experiment, trained: TrainedRun, fresh: Any, missing: list[str]) -> None:
    run, of = trained.folder.path, trained.folder.features()
    if missing and of is None:
        raise _refused(run, f"lacks {missing[0]} ({len(missing)} such)")
    if of is None and built.features is None:
        return
    here = built.features.weights if built.features else weights_digest(fresh)
    if of is None or of.weights != here:
        there = of.weights[:12] if of else "its own"
        raise _refused(
            run, f"reads features of other weights ({there}, here {here[:12]}), so that its "
            "classifier is of no use here", "model.pretrained, model.norm and seed as they were",
        )


def _refused(run: Any, what: str, expected: str = "the same model.*, data and classes"):
    return errors.UsageError(f"--init {run}: its model {what}. Expected {expected}.")
