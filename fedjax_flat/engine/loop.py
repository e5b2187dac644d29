"""The loop around the round: dispatch, evaluate, record, checkpoint, stop well."""

import contextlib
import dataclasses
import os
import time
from typing import Any

import jax
import ml_collections
import numpy as np
import tqdm

from fedjax_flat import debug, errors, experiment
from fedjax_flat.engine import metrics
from fedjax_flat.engine.checkpoint import Checkpoints
from fedjax_flat.engine.interrupt import stop_request
from fedjax_flat.engine.round import RoundInfo, TrainState, floats_per_client, many_rounds
from fedjax_flat.engine.run_folder import RunFolder

DISPATCH_SECONDS = 0.5  # how long a Ctrl-C may wait, beyond the round in flight


@dataclasses.dataclass(frozen=True)
class Result:
    """A trained state, its models by name and all records."""

    state: TrainState
    models: dict[str, Any]
    records: list[dict[str, Any]]
    stopped_by: int | None  # the signal that cut the run short

    def accuracy(self, window: int, **selection) -> tuple[float, float, int]:
        """(mean, standard deviation, number of rounds) over the last `window` rounds."""
        return metrics.window_mean(self.records, window, **selection)


def train(
    config: ml_collections.ConfigDict,
    run: str | os.PathLike,
    *,
    data_dir: str | os.PathLike | None = None,
    progress: bool = True,
) -> Result:
    """Trains as `config` says in run folder `run`, going on from its newest checkpoint."""
    built = experiment.build(config, data_dir)
    folder = RunFolder(run)
    folder.open(config, built.partition)
    checkpoints = Checkpoints(folder.checkpoints, config.checkpoint.keep)
    try:
        restored = checkpoints.restore(jax.eval_shape(built.init))
        start, state = restored or (0, built.init())
        if start > config.rounds:
            raise errors.UsageError(
                f"{run} is already at round {start}, past rounds = {config.rounds}. Raise rounds, "
                "or choose another folder with --run."
            )
        folder.record(config, built.partition)
        writer = metrics.Writer(
            folder.metrics_file, after_round=start, tensorboard=config.tensorboard
        )
        with (
            contextlib.closing(writer),
            stop_request() as stop,
            debug.checks() if config.debug else contextlib.nullcontext(),
            tqdm.tqdm(
                total=config.rounds, initial=start, unit="round", disable=not progress,
                dynamic_ncols=True, desc=os.path.basename(os.fspath(run)),
            ) as bar,
        ):
            loop = _Loop(built, checkpoints, writer, bar)
            state = loop.run(state, start, stop)
    finally:
        checkpoints.close()
    return Result(
        state=state,
        models=built.algorithm.models(state.server),
        records=metrics.read(folder.metrics_file),
        stopped_by=stop.signal,
    )


class _Loop:
    def __init__(self, built: experiment.Experiment, checkpoints: Checkpoints, writer, bar):
        self.built, self.config = built, built.config
        self.checkpoints, self.writer, self.bar = checkpoints, writer, bar
        rounds = many_rounds(built.step, self.config.rounds_per_dispatch)
        self.dispatch = jax.jit(rounds, donate_argnums=0)

    def run(self, state: TrainState, start: int, stop) -> TrainState:
        config = self.config
        floats = floats_per_client(self.built.algorithm, state, self.built.data)
        done, batch = start, 1
        if done == 0:
            self.evaluate(state, done)
        while done < config.rounds and stop.signal is None:
            n = min(batch, self.next_event(done) - done)
            began = time.perf_counter()
            # Nothing may travel between host and device in here; op by op, constants would.
            with jax.transfer_guard("allow" if config.debug else "disallow"):
                state, infos = self.dispatch(state, self.built.data, jax.device_put(np.int32(n)))
            infos = jax.tree.map(lambda x, n=n: np.asarray(x)[:n], jax.device_get(infos))
            seconds = time.perf_counter() - began
            self.check_finite(infos, done)
            self.record(infos, done, seconds, floats)
            done += n
            self.bar.update(n)
            self.bar.set_postfix(loss=f"{infos.loss[-1]:.3f}", refresh=False)
            if self.is_evaluated(done):
                self.evaluate(state, done)
            if done % config.checkpoint.every == 0 or done == config.rounds:
                self.save(done, state)
            batch = max(1, min(config.rounds_per_dispatch, int(DISPATCH_SECONDS * n / seconds)))
        self.save(done, state)
        return state

    def next_event(self, done: int) -> int:
        """The next round that is evaluated or saved."""
        config = self.config
        after = lambda every: (done // every + 1) * every
        last_rounds = max(done + 1, config.rounds - config.eval.window + 1)
        return min(
            after(config.eval.every), after(config.checkpoint.every), last_rounds, config.rounds
        )

    def is_evaluated(self, done: int) -> bool:
        config = self.config
        return done % config.eval.every == 0 or done > config.rounds - config.eval.window

    def evaluate(self, state: TrainState, done: int) -> None:
        for model, params in self.built.algorithm.models(state.server).items():
            for split, examples in self.built.splits.items():
                totals = self.built.evaluate(params, examples)
                loss, accuracy = jax.device_get(totals.means())
                self.writer.write(
                    {
                        "round": done, "split": split, "model": model,
                        "loss": float(loss), "accuracy": float(accuracy),
                    }
                )

    def record(self, infos: RoundInfo, done: int, seconds: float, floats) -> None:
        down, up = floats
        speed = float(infos.examples.sum() / seconds)
        for i in range(len(infos.loss)):
            self.writer.write(
                {
                    "round": done + i + 1, "split": "cohort", "model": "local",
                    "loss": float(infos.loss[i]), "accuracy": float(infos.accuracy[i]),
                    "drift": float(infos.drift[i]), "clients": int(infos.clients[i]),
                    "examples": int(infos.examples[i]), "examples_per_s": speed,
                    "floats_down": int(infos.clients[i]) * down,
                    "floats_up": int(infos.clients[i]) * up,
                }
            )

    def check_finite(self, infos: RoundInfo, done: int) -> None:
        if infos.finite.all():
            return
        self.writer.flush()
        bad = done + int(np.argmin(infos.finite)) + 1
        kept = self.checkpoints.rounds
        raise errors.DivergedError(
            f"training turned non-finite in round {bad}. "
            + (f"The checkpoint of round {kept[-1]} is kept. " if kept else "No checkpoint yet. ")
            + "Try a smaller client.learning_rate or server.learning_rate, or --config.debug=True "
            "to see the client, step and tensor."
        )

    def save(self, done: int, state: TrainState) -> None:
        self.writer.flush()
        self.checkpoints.save(done, state)

