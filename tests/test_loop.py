"""The training loop: reproducible, resumable, compiled once, and polite when things go wrong."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import chex
import jax
import numpy as np
import pytest
from conftest import assert_same_bits, small_config

import fedjax_flat as ff
from fedjax_flat.run import mark, metrics
from fedjax_flat.run.loop import train
from fedjax_flat.run.run_folder import RunFolder

TIMES = ("examples_per_s",)


def quiet_train(config, run, **options):
    return train(config, run, progress=False, **options)


def untimed(records):
    return [{k: v for k, v in r.items() if k not in TIMES} for r in records]


def test_run_folder(tmp_path):
    result = quiet_train(small_config(), tmp_path / "a")
    run = tmp_path / "a"
    assert json.loads((run / "config.json").read_text())["rounds"] == 6
    environment = json.loads((run / "environment.json").read_text())
    assert environment["versions"]["jax"] == jax.__version__
    assert environment["devices"]
    assert len(environment["commands"]) == 1
    assert (run / "figures").is_dir()
    assert (run / "partition.npz").exists()
    evaluated = [r["round"] for r in result.records if r["split"] == "test"]
    assert evaluated == [0, 3, 5, 6], "every third round and the last two"
    trained = [r for r in result.records if r["split"] == "cohort"]
    assert [r["round"] for r in trained] == [1, 2, 3, 4, 5, 6]
    parameters = ff.models.num_parameters(result.models["global"])
    assert trained[0]["bytes_down"] == trained[0]["bytes_up"] == 10 * 4 * parameters
    assert trained[0]["clients"] == 10
    assert {"loss", "accuracy", "drift", "examples_per_s"} <= set(trained[0])
    last = [r["accuracy"] for r in result.records if r["split"] == "test"][-2:]
    assert result.score(2) == (np.mean(last), np.std(last), 2)


def test_learns(tmp_path):
    config = small_config(rounds=60, eval__window=5)
    accuracy, _, count = quiet_train(config, tmp_path / "a").score(5)
    assert count == 5
    assert accuracy > 0.85


def test_same_seed_same_bits_and_evaluation_changes_nothing(tmp_path):
    first = quiet_train(small_config(), tmp_path / "a")
    again = quiet_train(small_config(), tmp_path / "b")
    assert_same_bits(first.state, again.state)
    assert untimed(first.records) == untimed(again.records)
    looked = small_config(
        eval__every=1, eval__splits=("test", "train"), checkpoint__every=1, rounds_per_dispatch=1
    )
    watched = quiet_train(looked, tmp_path / "c")
    assert_same_bits(first.state, watched.state)
    other = quiet_train(small_config(seed=1), tmp_path / "d")
    assert untimed(first.records)[1] != untimed(other.records)[1]


def test_resume_equals_an_uninterrupted_run(tmp_path):
    whole = quiet_train(small_config(rounds=8), tmp_path / "whole")
    quiet_train(small_config(rounds=4, eval__window=1), tmp_path / "parts")
    resumed = quiet_train(small_config(rounds=8), tmp_path / "parts")
    assert_same_bits(whole.state, resumed.state)
    keep = lambda records: [r for r in untimed(records) if r["round"] != 4]
    assert keep(whole.records) == keep(resumed.records)
    environment = json.loads((tmp_path / "parts" / "environment.json").read_text())
    assert len(environment["commands"]) == 2


def test_finished_run_is_left_as_it_is(tmp_path):
    first = quiet_train(small_config(), tmp_path / "a")
    again = quiet_train(small_config(), tmp_path / "a")
    assert_same_bits(first.state, again.state)
    assert first.records == again.records


def test_starting_again_from_round_zero_repeats_no_record(tmp_path):
    first = quiet_train(small_config(rounds=2), tmp_path / "a")
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    again = quiet_train(small_config(rounds=2), tmp_path / "a")
    assert untimed(first.records) == untimed(again.records)


def test_resume_with_state_on_the_server(tmp_path):
    options = {"server__momentum": 0.9, "server__learning_rate": 0.5, "client__momentum": 0.5,
               "client__learning_rate_decay": 0.9}
    whole = quiet_train(small_config(rounds=4, **options), tmp_path / "whole")
    quiet_train(small_config(rounds=2, **options), tmp_path / "parts")
    resumed = quiet_train(small_config(rounds=4, **options), tmp_path / "parts")
    assert_same_bits(whole.state, resumed.state)


def command(run, *overrides):
    return [sys.executable, "-m", "fedjax_flat", "train", "--quiet", "--run", str(run),
            "--config", str(pathlib.Path(__file__).parents[1] / "configs" / "digits_fedavg.py"),
            *(f"--config.{o}" for o in overrides)]


def wait_for(path, process):
    for _ in range(1200):
        if path.exists():
            return
        assert process.poll() is None, "ended too early"
        time.sleep(0.05)
    raise AssertionError(f"{path} did not appear")


LONG = ("rounds=4000", "checkpoint.every=50", "eval.every=100", "rounds_per_dispatch=10")


def test_kill_9_loses_nothing_that_was_saved(tmp_path):
    process = subprocess.Popen(command(tmp_path / "killed", *LONG), env=dict(os.environ))
    wait_for(tmp_path / "killed" / "checkpoints" / "150", process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    reached = max(int(p.name) for p in (tmp_path / "killed" / "checkpoints").glob("[0-9]*")
                  if p.name.isdigit())
    assert 150 <= reached < 4000
    config = small_config(rounds=reached + 60, checkpoint__every=50, eval__every=100)
    resumed = quiet_train(config, tmp_path / "killed")
    whole = quiet_train(config, tmp_path / "whole")
    assert_same_bits(whole.state, resumed.state)
    assert untimed(whole.records) == untimed(resumed.records)


@pytest.mark.parametrize("number", [
    signal.SIGINT, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)
])
def test_signals_finish_the_round_save_and_say_how_to_go_on(tmp_path, number):
    run = tmp_path / "stopped"
    process = subprocess.Popen(
        [*command(run, *LONG), "--data", str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    wait_for(run / "checkpoints" / "100", process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert f"saved. To go on: fedjax-flat train --run {run} --data {tmp_path}\n" in output
    done = int(output.split("after round ")[1].split()[0])
    assert (run / "checkpoints" / str(done)).is_dir()
    records = metrics.read(run / "metrics.jsonl")
    assert max(r["round"] for r in records) == done


def test_fifty_rounds_are_traced_once_and_move_no_array(tmp_path, monkeypatch):
    """The loop itself dispatches under a transfer guard; here the number of traces is limited."""
    original = ff.round_step

    def counted(*args, **options):
        # One trace for the shapes of the infos, one for the loop body.
        return chex.assert_max_traces(original(*args, **options), n=2)

    monkeypatch.setattr("fedjax_flat.experiment.assembly.round_step", counted)
    compiled = []
    monkeypatch.setattr(
        jax, "jit", lambda f, _jit=jax.jit, **kw: compiled.append(_jit(f, **kw)) or compiled[-1]
    )
    quiet_train(small_config(rounds=50, eval__every=7, checkpoint__every=20), tmp_path / "a")
    chex.clear_trace_counter()
    dispatch = [f for f in compiled if "many_rounds" in getattr(f, "__qualname__", "")]
    assert [f._cache_size() for f in dispatch] == [1]


def test_transfer_guard_catches_a_host_value():
    """The guard in the loop is not vacuous: a Python number passed to the dispatch is refused."""
    step = jax.jit(lambda x, n: x + n)
    x = jax.device_put(np.float32(1))
    with jax.transfer_guard("disallow"):
        assert step(x, jax.device_put(np.float32(2))) is not None
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            step(x, 2.0)


def test_divergence_stops_with_the_round_and_keeps_the_last_good_checkpoint(tmp_path):
    good = small_config(rounds=2)
    quiet_train(good, tmp_path / "a")
    bad = small_config(client__learning_rate=1e30, rounds=6)
    with pytest.raises(ff.DivergedError, match=r"non-finite in round 1\. No checkpoint yet"):
        quiet_train(bad, tmp_path / "b")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    config["client"]["learning_rate"] = 1e30  # as if it had diverged after round 2
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    (tmp_path / "a" / mark.MARK).unlink()  # it would tell
    with pytest.raises(ff.DivergedError, match=r"round 3\. The checkpoint of round 2 is kept"):
        quiet_train(bad, tmp_path / "a")
    assert (tmp_path / "a" / "checkpoints" / "2").is_dir()


def test_debug_mode_names_client_step_and_tensor(tmp_path):
    config = small_config(
        client__learning_rate=1e25, cohort__size=2, client__batch_size=40, debug=True
    )
    with pytest.raises(
        ff.DivergedError, match=r"not finite at client \d+, step [01]: gradient/\w+/\w+ \(shape"
    ):
        quiet_train(config, tmp_path / "a")


@pytest.mark.slow
def test_debug_mode_is_the_same_maths(tmp_path):
    options = {"rounds": 1, "cohort__size": 2, "client__batch_size": 40}
    fast = quiet_train(small_config(**options), tmp_path / "fast")
    slow = quiet_train(small_config(debug=True, **options), tmp_path / "slow")
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        fast.models, slow.models,
    )


def test_run_folder_of_another_config(tmp_path):
    quiet_train(small_config(), tmp_path / "a")
    with pytest.raises(ff.UsageError, match=r"another config:\n  client.learning_rate: 0.1 -> 0.2"):
        quiet_train(small_config(client__learning_rate=0.2), tmp_path / "a")
    with pytest.raises(ff.UsageError, match="already at round 6, past rounds = 3"):
        quiet_train(small_config(rounds=3), tmp_path / "a")
    assert json.loads((tmp_path / "a" / "config.json").read_text())["rounds"] == 6


def test_two_processes_do_not_train_in_one_folder(tmp_path):
    quiet_train(small_config(), tmp_path / "a")
    with RunFolder(tmp_path / "a").in_use(), pytest.raises(ff.UsageError, match="another process"):
        quiet_train(small_config(rounds=8), tmp_path / "a")
    assert int(quiet_train(small_config(rounds=8), tmp_path / "a").state.round) == 8


def test_unwritable_run_folder(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ff.UsageError, match="cannot write to run folder"):
        quiet_train(small_config(), tmp_path / "file" / "run")


def test_metrics_of_a_killed_process_lose_only_the_cut_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    records = [{"round": i, "split": "cohort", "model": "local"} for i in (1, 2)]
    path.write_text("".join(f"{json.dumps(r)}\n" for r in records) + '{"rou')
    assert metrics.read(path) == records
    metrics.Writer(path, after_round=1).close()
    assert metrics.read(path) == records[:1]
