"""The loop around the round: dispatch, evaluate, record, checkpoint, stop well."""

import contextlib
import dataclasses
import logging
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import ml_collections
import numpy as np

from fedjax_flat import debug, errors, experiment, memory
from fedjax_flat import progress as progress_lib
from fedjax_flat.data import FederatedData, HostData
from fedjax_flat.engine.feed import Feed
from fedjax_flat.engine.round import RoundInfo, Traffic, TrainState, many_rounds, traffic
from fedjax_flat.experiment import costs, phases
from fedjax_flat.run import branch, distributed, evaluation, flatness, loggers, metrics
from fedjax_flat.run.checkpoint import Checkpoints, with_keys, without_keys
from fedjax_flat.run.interrupt import stop_request
from fedjax_flat.run.restore import load_run
from fedjax_flat.run.run_folder import RunFolder
from fedjax_flat.wire import bits_of, models_in

logger = logging.getLogger("fedjax_flat")
DISPATCH_SECONDS = 0.5  # how long a Ctrl-C may wait, beyond the round in flight


@dataclasses.dataclass(frozen=True)
class Result:
    """A trained state, its models by name and all records."""

    state: TrainState
    models: dict[str, Any]
    records: list[dict[str, Any]]
    stopped_by: int | None  # the signal that cut the run short
    asked_to_stop: int | None = None  # the signal, though it came in the last round
    phase: str = ""  # the last that was trained, of several

    def score(self, window: int, **selection) -> tuple[float, float, int]:
        """(mean, standard deviation, number of rounds) over the last `window` rounds."""
        return metrics.window_mean(self.records, window, **selection)


def train(
    config: ml_collections.ConfigDict,
    run: str | os.PathLike,
    *,
    data_dir: str | os.PathLike | None = None,
    start_from: str | os.PathLike | None = None,
    progress: bool = True,
    allow_other_kernels: bool = False,
    fresh: bool = False,
    init: str | os.PathLike | None = None,
) -> Result:
    """Trains as `config` says in run folder `run`, going on from its newest checkpoint.

    With `start_from`, `RUN` or `RUN@ROUND`, a new run begins with a checkpoint of another
    (run/branch.py), up to which it would have been trained alike; with `init`, another run or a
    file of weights, with its global model alone (`hand_over`, `from_file`, experiment/phases.py).
    A run that began with other compiled kernels (ops/kernels.py) goes on only if that is allowed;
    with `fresh`, the run that is there is deleted first.
    """
    if start_from is not None and init is not None:
        raise errors.UsageError(
            f"--from {start_from} and --init {init}: a run begins with the whole state of one, or "
            "with the model of one. Leave one out."
        )
    built = experiment.build(config, data_dir)
    if start_from is not None and distributed.is_primary():
        folder = RunFolder(run)
        if fresh and folder.can_be_deleted():
            with folder.in_use():
                folder.delete()
        branch.begin(built, run, start_from, allow_other_kernels=allow_other_kernels)
    fresh = fresh and start_from is None
    with contextlib.ExitStack() as stack:
        files = _Files(built, run, allow_other_kernels, fresh, init)
        stack.enter_context(files.explained())
        stack.enter_context(contextlib.closing(files))
        start, state = files.restore(lambda: _start_of(built, init, data_dir))
        if start > config.rounds:
            raise errors.UsageError(
                f"{run} is already at round {start}, past rounds = {config.rounds}. Raise rounds, "
                "or choose another folder with --run."
            )
        files.begin(start)
        logger.info("cohort: %s (%s)", built.over.name, jax.default_backend())
        if jax.tree.leaves(state.clients):
            size = memory.gigabytes(sum(x.nbytes for x in jax.tree.leaves(state.clients)))
            logger.info("client state: %s in %s memory", size, built.client_state_in)
        stop = stack.enter_context(stop_request())
        if config.debug:
            stack.enter_context(debug.checks())
        bar = stack.enter_context(
            progress_lib.bar(
                what=os.path.basename(os.fspath(run)), total=config.rounds, initial=start,
                unit="rounds", show=progress and distributed.is_primary(),
            )
        )
        state, stopped_by = Loop(built, files, bar).run(state, start, stop)
    return Result(
        state=state,
        models=built.models(state),
        records=metrics.read(RunFolder(run).metrics_file),
        stopped_by=stopped_by,
        asked_to_stop=stop.signal,
    )


def _start_of(built: experiment.Experiment, init, data_dir) -> TrainState | None:
    """The state that a file's weights or another run make, if there is one."""
    if init is None:
        return None
    if os.path.isfile(init):
        return phases.from_file(built, init)
    before = load_run(init, data_dir)
    return phases.hand_over(built, before.experiment, before.state, init)


class _Files:
    """What process 0 keeps on disk; in the other processes, nothing."""

    def __init__(
        self,
        built: experiment.Experiment,
        run: str | os.PathLike,
        allow_other_kernels: bool,
        fresh: bool,
        init: str | os.PathLike | None,
    ):
        self.built, self.primary = built, distributed.is_primary()
        self.writer: metrics.Writer | None = None
        self.client_writer: metrics.Writer | None = None
        self.checkpoints: Checkpoints | None = None
        self.folder = RunFolder(run)
        if not self.primary:
            return
        self.folder.check_path()
        with contextlib.ExitStack() as stack:
            fresh = fresh and self.folder.can_be_deleted()
            stack.enter_context(self.folder.in_use())
            if fresh:
                self.folder.delete()
            self.folder.open(
                built.config, built.partition, features=built.features, init=init,
                grouping=built.grouping,
                allow_other_kernels=allow_other_kernels,
            )
            with self.folder.explained():
                self.checkpoints = Checkpoints(
                    self.folder.checkpoints, built.config.checkpoint.keep
                )
            self.checkpoints.discard_unfinished()
            self.lock = stack.pop_all()

    @contextlib.contextmanager
    def explained(self):
        """A disk or a memory that does not suffice, in one sentence with what is kept."""
        try:
            with self.folder.explained() if self.primary else contextlib.nullcontext():
                yield
        except (MemoryError, jax.errors.JaxRuntimeError) as e:
            if not memory.is_exhausted(e):
                raise
            raise errors.UsageError(
                f"there is not enough memory ({str(e).splitlines()[0]}). {self.folder.kept()} Try "
                "a smaller client.batch_size or eval.batch_size, --config.cohort.strategy=map, or "
                "a smaller model."
            ) from e

    def restore(self, first: Callable[[], TrainState | None]) -> tuple[int, TrainState]:
        """The newest checkpoint, or the state before the first round: `first()`, if it is one."""
        like = self.built.init()
        restored = self.checkpoints.restore(like) if self.checkpoints else None
        start = int(distributed.from_primary(np.int32(-1 if restored is None else restored[0])))
        state = restored[1] if restored else like
        if start < 0 and (given := first()) is not None:
            state = given
            if self.checkpoints:
                self.checkpoints.save(0, state)  # whatever becomes of the run it is from
        if start >= 0 and jax.process_count() > 1:
            state = with_keys(distributed.from_primary(without_keys(state)), like)
        over = self.built.over
        clients = over.share(state.clients)
        return max(start, 0), over.replicate(state._replace(clients=()))._replace(clients=clients)

    def begin(self, start: int) -> None:
        """Records the settings, and drops the metrics of rounds that will be run again."""
        if self.primary:
            config = self.built.config
            self.folder.record(config, self.built.partition)
            # From the start, the evaluation before the first round is made again as well.
            self.writer = metrics.Writer(self.folder.metrics_file, after_round=start or -1)
            self.writer.also = loggers.begin(config, self.folder.path, self.writer.kept, start)
            if config.eval.clients or self.built.evaluate_personal:
                self.client_writer = metrics.Writer(
                    self.folder.clients_file, after_round=start or -1
                )
            self.say_gaps(start)

    def say_gaps(self, start: int) -> None:
        """Warns of rounds whose records were lost; they are informational, so training goes on."""
        assert self.writer
        there = {r["round"] for r in self.writer.kept if r["split"] == "cohort"}
        lost = {self.folder.metrics_file: set(range(1, start + 1)) - there}
        if self.client_writer:
            measured = {r["round"] for r in self.writer.kept if "fairness.worst" in r}
            lost[self.folder.clients_file] = measured - {
                r["round"] for r in self.client_writer.kept
            }
        for file, rounds in lost.items():
            if rounds:
                warnings.warn(
                    f"{file} has lost the records of round {metrics.ranges(rounds)}; training goes "
                    "on, its bits do not depend on them", stacklevel=4,
                )

    def lacks_evaluation(self, done: int) -> bool:
        """Whether nothing is recorded of the models after round `done`."""
        kept = self.writer.kept if self.writer else []
        return not any(r["round"] == done and r["split"] != "cohort" for r in kept)

    def write(self, record: dict[str, Any]) -> None:
        if self.writer:
            self.writer.write(record)

    def write_clients(self, record: dict[str, Any]) -> None:
        if self.client_writer:
            self.client_writer.write(record)

    def save(self, done: int, state: TrainState) -> None:
        if self.writer and self.checkpoints:
            self.writer.flush()
            if self.client_writer:
                self.client_writer.flush()
            self.checkpoints.save(done, state)

    @property
    def saved(self) -> list[int]:
        return self.checkpoints.rounds if self.checkpoints else []

    def close(self) -> None:
        """All of it, even where a full disk refuses what is pending."""
        with contextlib.ExitStack() as stack:
            if self.checkpoints:
                stack.enter_context(self.lock)
                stack.callback(self.checkpoints.close)
            for writer in (self.writer, self.client_writer):
                if writer:
                    stack.callback(writer.close)


class Loop:
    """Rounds up to the last, or up to `until`; what they make goes to `files`."""

    def __init__(self, built: experiment.Experiment, files: Any, bar, until: int | None = None):
        self.built, self.config, self.files, self.bar = built, built.config, files, bar
        self.until = built.config.rounds if until is None else until
        on_host = isinstance(built.data, HostData)  # each round brings its examples along
        self.most = 1 if on_host else self.config.rounds_per_dispatch
        self.dispatch = jax.jit(many_rounds(built.step, self.most), donate_argnums=0)
        self.work: float | None = None  # multiply-adds per example, where a formula says
        self.data: Any = None
        self.valid_until = 0  # the round from which on there are other groups

    def run(self, state: TrainState, start: int, stop) -> tuple[TrainState, int | None]:
        """The state after the last round, and the signal that cut it short."""
        built = self.built
        if not isinstance(built.data, HostData):
            return self.rounds(state, start, stop, self.placed)
        feed = Feed(built.data_at, built.cohort_of, state.key, built.over.replicate)
        with contextlib.closing(feed):
            return self.rounds(state, start, stop, feed.of_round)

    def placed(self, done: int) -> FederatedData:
        """The data of the next round; groups are placed again only when they change."""
        if done >= self.valid_until:
            self.data = self.built.data_at(done)
            self.valid_until = self.next_groups(done)
        return self.data

    def next_groups(self, done: int) -> int:
        """The next round that has other groups; or none has."""
        grouping = self.built.grouping
        change = grouping.next_change(done) if grouping else None
        return self.config.rounds if change is None else change

    def rounds(
        self, state: TrainState, start: int, stop, data_of: Callable[[int], FederatedData]
    ) -> tuple[TrainState, int | None]:
        config = self.config
        algorithm, data = self.built.algorithm, self.built.data_of([0])
        handed = bits_of(models_in(self.built.models(state)["global"])) // 8
        kinds = range(len(algorithm.exchanges[-1].bits))
        sent = [traffic(algorithm, state, data, kind) for kind in kinds]
        self.work = costs.of_experiment(self.built)
        done, batch, signal = start, 1, 0
        again = int(self.is_evaluated(done) and self.files.lacks_evaluation(done))
        if done == 0 or int(distributed.from_primary(np.int32(again))):
            self.evaluate(state, done)
        if done == 0:
            self.measure_curvature(state, done)
        while done < self.until:
            n = min(batch, self.next_event(done) - done) if distributed.is_primary() else 0
            n, signal = distributed.largest(n, stop.signal or 0)
            if signal:
                break
            began = time.perf_counter()
            count = self.built.over.replicate(jax.device_put(np.int32(n)))
            data = data_of(done)
            # Nothing may travel between host and device in here; op by op, constants would.
            with jax.transfer_guard("allow" if config.debug else "disallow"):
                state, infos = self.dispatch(state, data, count)
            infos = jax.tree.map(lambda x, n=n: np.asarray(x)[:n], jax.device_get(infos))
            seconds = time.perf_counter() - began
            self.check_finite(infos, done)
            self.record(infos, done, seconds, sent, handed)
            done += n
            self.bar.update(n)
            self.bar.set_postfix(loss=f"{infos.report['loss'][-1]:.3f}", refresh=False)
            if self.is_evaluated(done):
                self.evaluate(state, done)
            self.measure_curvature(state, done)
            if done % config.checkpoint.every == 0 or done == self.until:
                self.files.save(done, state)
            batch = max(1, min(self.most, int(DISPATCH_SECONDS * n / seconds)))
        self.files.save(done, state)
        return state, signal or None

    def next_event(self, done: int) -> int:
        """The next round that is evaluated, measured or saved."""
        config = self.config
        after = lambda every: (done // every + 1) * every if every else config.rounds
        last_rounds = max(done + 1, config.rounds - config.eval.window + 1)
        return min(
            after(config.eval.every), after(config.curvature.every),
            after(config.checkpoint.every), last_rounds, self.next_groups(done), self.until,
        )

    def is_evaluated(self, done: int) -> bool:
        config = self.config
        return done % config.eval.every == 0 or done > config.rounds - config.eval.window

    def evaluate(self, state: TrainState, done: int) -> None:
        for found in evaluation.of_splits(self.built, state, done):
            self.files.write(found)
        for found, each in evaluation.of_clients(self.built, state, done):
            self.files.write(found)
            self.files.write_clients(each)
        for found in evaluation.of_classes(self.built, state, done):
            self.files.write(found)

    def measure_curvature(self, state: TrainState, done: int) -> None:
        every = self.config.curvature.every
        if every and done % every == 0:
            for found in flatness.records(self.built, state, done):
                self.files.write(found)

    def record(
        self, infos: RoundInfo, done: int, seconds: float, sent: list[Traffic], handed: int
    ) -> None:
        speed = float(infos.examples.sum() / seconds)
        for i in range(len(infos.drift)):
            kinds = [int(n) for n in infos.kinds[i]]
            down, up = (sum(n * t[way] for n, t in zip(kinds, sent, strict=True)) // 8
                        for way in (0, 1))
            if (styled := self.built.styled) and done + i == 0:
                down, up = down + styled.down, up + styled.up
            self.files.write(
                {
                    "round": done + i + 1, "split": "cohort", "model": "local",
                    **evaluation.ordered(
                        self.built.task, {name: v[i] for name, v in infos.report.items()}
                    ),
                    "drift": float(infos.drift[i]), "norm": float(infos.norm[i]),
                    "clients": sum(kinds), "examples": int(infos.examples[i]),
                    "examples_per_s": speed, "bytes_down": down, "bytes_up": up,
                    **({"links": int(links), "bytes_across": int(links) * handed}
                       if (links := infos.links[i]) else {}),
                    **({"flops": self.work * float(infos.examples[i])} if self.work else {}),
                    # Uploads that differ in size are weighed by the method: bytes_up again.
                    **{name: _number(values[i]) for name, values in infos.metrics.items()},
                }
            )

    def check_finite(self, infos: RoundInfo, done: int) -> None:
        if infos.finite.all():
            return
        bad = done + int(np.argmin(infos.finite)) + 1
        kept = self.files.saved
        raise errors.DivergedError(
            f"training turned non-finite in round {bad}. "
            + (f"The checkpoint of round {kept[-1]} is kept. " if kept else "No checkpoint yet. ")
            + self.built.algorithm.advice
        )


def _number(value: Any) -> float | int:
    """A metric; of bytes, two numbers are one."""
    return float(value) if not value.ndim else int(value[0]) * 65536 + int(value[1])
