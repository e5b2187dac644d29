"""Several devices and several processes do the same training as one."""

import os
import pathlib
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from conftest import Problem, assert_close, small_config

import fedjax_flat as ff
from fedjax_flat import cli, experiment
from fedjax_flat.engine import sampling
from fedjax_flat.run import distributed, metrics
from fedjax_flat.run.checkpoint import Checkpoints
from fedjax_flat.run.loop import train

CONFIG = str(pathlib.Path(__file__).parents[1] / "configs" / "digits_fedavg.py")
OVERRIDES = ("rounds=3", "eval.window=1", "cohort.size=7", "checkpoint.every=3")


def environment(devices):
    flags = f"--xla_force_host_platform_device_count={devices}"
    return {**os.environ, "XLA_FLAGS": flags}


def launch(run, *arguments, devices=1):
    command = [sys.executable, "-m", "fedjax_flat", "train", "--quiet", "--run", str(run),
               "--config", CONFIG, *(f"--config.{o}" for o in OVERRIDES), *arguments]
    return subprocess.Popen(command, env=environment(devices), text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def trained(run):
    """The server state in the newest checkpoint of a run."""
    config = small_config(rounds=3, cohort__size=7)
    checkpoints = Checkpoints(run / "checkpoints")
    round, state = checkpoints.restore(jax.eval_shape(experiment.build(config).init))
    checkpoints.close()
    assert round == 3
    return jax.tree.map(np.asarray, state.server)


SHARED_STATE = """
import jax, numpy as np
from conftest import small_config
import fedjax_flat as ff

config = small_config(algorithm__name="scaffold", rounds=2, cohort__size=6, partition__clients=8)
shared = ff.train(config, "RUN/a", progress=False)
rows = [x.addressable_shards[0].data.shape[0] for x in jax.tree.leaves(shared.state.clients)]
assert jax.device_count() == 4 and set(rows) == {2}, rows
config.rounds = 3
again = ff.train(config, "RUN/a", progress=False)  # resumes
config.cohort.strategy, config.rounds = "map", 3
alone = ff.train(config, "RUN/b", progress=False)
for a, b in zip(jax.tree.leaves(again.state.clients), jax.tree.leaves(alone.state.clients)):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
"""


@pytest.mark.slow
def test_client_state_is_shared_by_the_devices(tmp_path):
    code = SHARED_STATE.replace("RUN", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], env=environment(4), text=True,
                          cwd=pathlib.Path(__file__).parent, capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    run = tmp_path_factory.mktemp("alone") / "run"
    config = small_config(rounds=3, eval__window=1, cohort__size=7, checkpoint__every=3)
    result = train(config, run, progress=False)
    return jax.tree.map(np.asarray, result.state.server), result.records


def same_metrics(records, other):
    assert len(records) == len(other)
    for a, b in zip(records, other, strict=True):
        assert a["round"] == b["round"]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["accuracy"] == pytest.approx(b["accuracy"], abs=1e-6)


@pytest.mark.parametrize(
    "devices", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 8]
)
def test_sharded_over_simulated_devices(devices, tmp_path, alone):
    """A cohort of 7 divides over neither 2 nor 8 devices; `auto` chooses to shard."""
    strategy = "--config.cohort.strategy=" + ("auto" if devices > 1 else "sharded")
    process = launch(tmp_path / "run", strategy, devices=devices)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert_close(trained(tmp_path / "run"), alone[0], 1e-5)
    same_metrics(metrics.read(tmp_path / "run" / "metrics.jsonl"), alone[1])


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


@pytest.mark.slow  # in a SLURM job: tests/test_launch.py
def test_two_processes_with_two_devices_each(tmp_path, alone):
    port = free_port()
    processes = [
        launch(tmp_path / f"run{i}", "--coordinator", f"localhost:{port}", "--processes", "2",
               "--process", str(i), devices=2)
        for i in range(2)
    ]
    outputs = [p.communicate(timeout=180) for p in processes]
    assert [p.returncode for p in processes] == [0, 0], outputs
    assert_close(trained(tmp_path / "run0"), alone[0], 1e-5)
    same_metrics(metrics.read(tmp_path / "run0" / "metrics.jsonl"), alone[1])
    assert not (tmp_path / "run1").exists(), "only process 0 writes"


def test_no_coordinator_is_an_error_and_not_a_hang(tmp_path):
    start = time.monotonic()
    process = launch(tmp_path / "run", "--coordinator", f"localhost:{free_port()}", "--processes",
                     "2", "--process", "1", "--timeout", "1")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "no coordinator answers at localhost" in err
    assert "Traceback" not in err
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, 2, None), "need --coordinator"),
        (("localhost:1", None, 0), "needs --processes"),
        (("localhost:1", 2, None), "needs --process"),
        (("localhost:1", 2, 2), "expected 0 to 1"),
        (("localhost", 2, 1), "expected HOST:PORT"),
    ],
)
def test_wrong_arguments(arguments, message, monkeypatch):
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ff.UsageError, match=message):
        distributed.start(*arguments)


@pytest.mark.parametrize(("variables", "advice"), [
    ({}, "Say where processes meet"), ({"SLURM_JOB_ID": "7"}, "start it with srun"),
])
def test_auto_outside_a_cluster_is_one_sentence(variables, advice, monkeypatch, capsys, tmp_path):
    for name in ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "OMPI_MCA_orte_hnp_uri"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["train", "--run", str(tmp_path / "run"), "--coordinator", "auto"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fedjax-flat: --coordinator auto: this is no task of a cluster")
    assert advice in said
    assert said.count("\n") == 1


def test_what_a_cluster_says_wrongly_is_one_sentence(monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"):
        monkeypatch.setenv(name, "many")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "here")
    with pytest.raises(ff.UsageError, match=r"this cluster does not say how: invalid .*'many'"):
        distributed.start("auto")


def test_the_largest_of_one_process():
    assert distributed.largest(3, 0) == [3, 0]


def test_more_devices_than_present():
    present = jax.device_count()
    with pytest.raises(ff.UsageError, match=f"devices = {present + 1}, but jax sees {present}"):
        ff.cohort_map("sharded", devices=present + 1)


def test_auto_on_one_cpu_is_map():
    assert ff.cohort_map("auto").name == "map"


def test_padding_a_cohort_to_a_multiple():
    cohort = ff.uniform(10, 5)(jax.random.key(0))
    padded = sampling.pad(cohort, 4)
    np.testing.assert_array_equal(padded.clients[:5], cohort.clients)
    np.testing.assert_array_equal(padded.mask, [True] * 5 + [False] * 3)
    assert sampling.pad(cohort, 5) is cohort


@pytest.mark.parametrize("strategy", ["map", "vmap", "sharded"])
def test_evaluation_of_every_client(strategy):
    """Per-client totals are those of each client's examples alone, and sum to the whole."""
    sizes = (5, 0, 9, 2)
    problem = Problem(sizes)
    sums = jax.jit(ff.client_evaluator(problem.task, 4, ff.cohort_map(strategy)))(
        problem.variables, problem.data
    )
    np.testing.assert_array_equal(sums["examples"], sizes)
    whole = ff.evaluator(problem.task, 16)(problem.variables, problem.data.examples)
    assert float(sums["loss"].sum()) == pytest.approx(float(whole["loss"]), rel=1e-6)
    third = jax.tree.map(lambda x: x[5:14], problem.data.examples)
    alone = ff.evaluator(problem.task, 16)(problem.variables, third)
    assert float(sums["loss"][2]) == pytest.approx(float(alone["loss"]), rel=1e-6)
