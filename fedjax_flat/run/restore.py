"""A trained run, read back from its folder."""

import os
from typing import Any, NamedTuple

import jax

from fedjax_flat import errors, experiment
from fedjax_flat.engine.round import TrainState
from fedjax_flat.models import Clusters, Variables
from fedjax_flat.run.checkpoint import Checkpoints
from fedjax_flat.run.run_folder import RunFolder


class TrainedRun(NamedTuple):
    """The experiment of a run folder, a state of it and its models by name."""

    folder: RunFolder
    experiment: experiment.Experiment
    state: TrainState
    models: dict[str, Variables]

    def model(self, name: str = "global", *, clusters: bool = False) -> Any:
        """One model, `global` or an averaged one; those of clusters if that is asked for."""
        found = errors.lookup(f"model of {self.folder.path}", name, self.models)
        if isinstance(found, Clusters) and not clusters:
            raise errors.UsageError(
                f"model {name} of {self.folder.path} is one for each cluster, which are evaluated "
                "while training and by `fedjax-flat masks`. Expected global here."
            )
        return found

    def at(self, round: int) -> "TrainedRun":
        """The same run at another of its checkpoints; nothing is built or compiled again."""
        state = _restored(self.folder, self.experiment, round)
        return self._replace(state=state, models=self.experiment.models(state))

    def client_state(self, client: int) -> Any:
        """What the method keeps for one client."""
        rows = self.state.clients
        if not jax.tree.leaves(rows):
            raise errors.UsageError(
                f"{self.folder.path} was trained with {self.experiment.config.algorithm.name}, "
                "which keeps no state for its clients. fedjax-flat algorithms lists who does."
            )
        count = self.experiment.data.num_clients
        if not 0 <= client < count:
            raise errors.UsageError(f"client {client} of {count}: expected 0 to {count - 1}.")
        return jax.tree.map(lambda x: x[client], rows)


def load_run(
    run: str | os.PathLike,
    data_dir: str | os.PathLike | None = None,
    *,
    round: int | None = None,
) -> TrainedRun:
    """Builds the experiment of a run folder and restores a checkpoint: the newest, or `round`'s."""
    folder = RunFolder(run)
    folder.check_path()
    folder.check_is_one()
    config = folder.config()
    folder.check_imports(config, warn=True)
    built = experiment.build(config, data_dir)
    folder.check_features(built.features)
    state = _restored(folder, built, round)
    return TrainedRun(folder, built, state, built.models(state))


def _restored(
    folder: RunFolder, built: experiment.Experiment, round: int | None
) -> TrainState:
    restored = None
    if folder.checkpoints.is_dir():
        checkpoints = Checkpoints(folder.checkpoints)
        restored = checkpoints.restore(built.init(), round)
        checkpoints.close()
    if restored is None:
        raise errors.UsageError(
            f"{folder.path} has no checkpoint yet: train it first, fedjax-flat train --run "
            f"{folder.path}."
        )
    return restored[1]
