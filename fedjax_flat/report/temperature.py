"""By what the logits of a classifier are best divided before its softmax (figure 3.3 of Fani's
thesis).

Fed3R's columns have length 1, and the softmax of its logits says little. Before it is fine-tuned
they are divided by a temperature tau: the one with the lowest mean loss on the train examples,

    tau = argmin of the mean over train examples of CE(y, softmax(W^T phi(x) / tau)).
"""

import os
import pathlib
from collections.abc import Sequence

import jax

from fedjax_flat import errors
from fedjax_flat.engine.evaluate import evaluator, in_blocks
from fedjax_flat.report import pictures
from fedjax_flat.run.restore import load_run
from fedjax_flat.tasks import Task, cross_entropy, masked_sum

GRID = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


def temperature(
    run: str | os.PathLike, taus: Sequence[float] = GRID, *, data_dir=None
) -> tuple[dict[float, float], pathlib.Path]:
    """(mean train loss by temperature, its figure), of the run's global model."""
    for tau in taus:
        errors.positive("--tau", tau)
    trained = load_run(run, data_dir)
    built = trained.experiment
    if trained.experiment.task.score != "accuracy":
        raise errors.UsageError(
            f"{run}: a temperature is of a classifier; its task reports {built.task.score}."
        )
    config = built.config
    sums = in_blocks(
        jax.jit(evaluator(_at_all(built.task, taus, config.task.temperature),
                          config.eval.batch_size)),
        20 * config.eval.batch_size,
    )(trained.model(), built.split("train"))
    losses = {tau: float(sums[str(tau)] / sums["units"]) for tau in sorted(taus)}
    return losses, draw(losses, trained.folder.figures / "temperature.png")


def _at_all(task: Task, taus: Sequence[float], own: float) -> Task:
    """`task`, whose sums have the loss at every temperature; its logits are divided by `own`."""

    def sums(outputs, batch):
        at = lambda tau: cross_entropy(outputs.logits * (own / tau), batch.labels)
        return {str(tau): masked_sum(at(tau), batch.mask) for tau in taus}

    return task._replace(sums=sums)


def draw(losses: dict[float, float], path: pathlib.Path) -> pathlib.Path:
    """The curve."""
    figure, (axes,) = pictures.new_figure(1, 1, (4.5, 3.2))
    axes.plot(list(losses), list(losses.values()), marker="o")
    axes.set(xscale="log", xlabel="temperature", ylabel="mean train loss")
    axes.grid(alpha=0.25)
    return pictures.save(figure, path)
