"""Malformed inputs: each ends in one sentence that names the value and the fix, exit code 2."""

import json
import pathlib
import re
import time

import numpy as np
import optax
import pytest
from conftest import Problem, small_config

import fedjax_flat as ff
from fedjax_flat import cli, disk
from fedjax_flat.data.partition import Partition, dirichlet, released
from fedjax_flat.experiment import config

CONFIG = str(pathlib.Path(__file__).parents[1] / "configs" / "digits_fedavg.py")


def refused(capsys, arguments, message, seconds=5.0):
    began = time.perf_counter()
    assert cli.main(list(arguments)) == cli.EXIT_USAGE
    out, err = capsys.readouterr()
    assert re.search(message, err), err
    assert err.startswith("fedjax-flat: ")
    assert "Traceback" not in err + out
    assert time.perf_counter() - began < seconds, "a check, not a try"


@pytest.mark.parametrize(("settings", "message"), [
    ("seed=4294967296", "config.seed = 4294967296: expected less than 4294967296"),
    ("seed=-1", "config.seed = -1: expected 0 or more"),
    ("partition.seed=4294967296", "partition.seed = 4294967296: expected less than 4294967296"),
    ("rounds=1000000000000", "rounds = 1000000000000: expected less than 2147483648"),
    ("rounds_per_dispatch=1000000000", "rounds_per_dispatch = 1000000000: expected at most"),
    ("client.steps=1000000000000", "client.steps = 1000000000000: expected less than"),
    ("client.epochs=1000000000000", "client.epochs = 1000000000000: expected less than"),
    ("client.rho_warmup=1000000000000;client.sharpness=sam", "rho_warmup = 1000000000000: exp"),
    ("client.batch_size=1000000000", r"client.batch_size = 1000000000: .* needs 256.0 GB; .* free"),
    ("client.batch_size=1000000000;cohort.strategy=vmap", r"needs 2560.0 GB; .* Choose a smaller"),
    ("eval.clients=True;eval.batch_size=1000000000", "eval.batch_size = 1000000000: .* needs"),
    ("eval.batch_size=1000000000000", "eval.batch_size = 1000000000000: expected less than"),
    ("data.resized_crop=1000000", "model mlp of 256000000 MB, .* needs 768000.0 GB"),
    ("model.hidden=1000000000", "model mlp of .* MB, .* needs .* GB; .* Choose a smaller one"),
    ("algorithm.name=fedavg+wima;server.wima.window=100000000",
     "WIMA's window of 100000000 models needs .* Lower server.wima.window"),
    ("algorithm.name=fedavg+swa;server.swa.start=1e12", "SWA with start = 1000000000000"),
    ("algorithm.name=fedavg+swa;server.swa.start=1e9", "first model in round 1000000000 "),
    ("algorithm.name=fedavg+swa;server.swa.start=inf", "server.swa.start = inf: expected a number"),
    ("algorithm.name=fedavg+swa;server.swa.cycle=1000000000000", "swa.cycle = 1000000000000: exp"),
    ("algorithm.name=fedavg+swa;server.swa.cycle=2147483647", "both together below 2147483648"),
    ("algorithm.name=fedavg+swa;server.swa.start=1e12;server.swa.averaging=False",
     "SWA with start = 1000000000000"),
    ("partition.alpha=inf", "partition.alpha = inf: expected a number that is finite, e.g. 0.5"),
    ("client.learning_rate=inf", "client.learning_rate = inf: expected a number that is finite"),
    ("partition.size_sigma=1e300", "sizes that differ beyond all numbers"),
    ("eval.splits=5", r"eval.splits = \(5,\): 5 is a int; expected strs, e.g. \('test',\)"),
    ("eval.splits=(1,2)", "eval.splits = .*expected strs"),
    ("eval.splits=('tset',)", "unknown split 'tset'"),
])
def test_settings(settings, message, tmp_path, capsys):
    overrides = [f"--config.{s}" for s in settings.split(";")]
    command = ["train", "--quiet", "--run", str(tmp_path / "run"), "--config", CONFIG, *overrides]
    refused(capsys, command, message)
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize(("text", "message"), [
    ("def get_config(:\n  pass\n", "config file .*bad.py, line 1: invalid syntax"),
    ("def get_config():\n  return 1 / 0\n", "bad.py, line 2: ZeroDivisionError: division by zero"),
    ("raise RuntimeError('no')\n", "bad.py, line 1: RuntimeError: no"),
    ("{}['missing']\n", "bad.py, line 1: KeyError: missing"),
    ("None.attribute\n", "bad.py, line 1: AttributeError: 'NoneType' object has no attribute"),
    ("import sys\nsys.exit(3)\n", r"bad.py ends the program \(exit 3\)"),
    ("import no_such_module\n", "bad.py, line 1: ModuleNotFoundError"),
    ("get_config = 3\n", r"bad.py defines no get_config\(\)"),
    ("def get_config():\n  return {'rounds': 3}\n", "returns dict: expected the config of"),
    ("def get_config():\n  class C: algorithm = 1\n  return C()\n", "returns C: expected"),
    ("def get_config():\n  pass\n", "returns NoneType: expected the config of"),
    ("\0", "bad.py"),
    ("# -*- coding: nonsense -*-\n", "bad.py"),
])
def test_config_files(text, message, tmp_path, capsys):
    (tmp_path / "bad.py").write_text(text)
    command = ["train", "--run", str(tmp_path / "run"), "--config", str(tmp_path / "bad.py")]
    refused(capsys, command, message)
    assert not (tmp_path / "run").exists()


FEATURES, LABELS = np.zeros((40, 3), np.float32), np.arange(40) % 4


@pytest.mark.parametrize(("arrays", "message"), [
    ({}, "has no arrays, but no inputs"),
    ({"inputs": FEATURES}, "has inputs, but no labels"),
    ({"inputs": np.array([{}] * 3), "labels": [0, 1, 2]}, "cannot be read as an .npz of plain"),
    ({"inputs": FEATURES[:0], "labels": LABELS[:0]}, "has no examples"),
    ({"inputs": FEATURES, "labels": LABELS[:0]}, "expected as many labels as inputs"),
    ({"inputs": np.float32(1), "labels": np.int32(1)}, "has no examples"),
    ({"inputs": FEATURES, "labels": LABELS, "num_classes": [1, 2]}, "num_classes"),
    ({"inputs": FEATURES, "labels": LABELS, "num_classes": "ten"}, "num_classes"),
    ({"inputs": FEATURES, "labels": LABELS, "mean": ["a"], "std": ["b"]}, "mean"),
    ({"inputs": FEATURES, "labels": LABELS - 1}, "label -1 of train example 0 is no class"),
    ({"inputs": FEATURES.astype(str), "labels": LABELS}, "expected numbers"),
    ({"inputs": FEATURES, "labels": LABELS, "test_inputs": FEATURES}, "but no test_labels"),
    ({"inputs": FEATURES, "labels": LABELS, "owners": LABELS[:3]}, "owners of shape"),
])
def test_npz_files(arrays, message, tmp_path, capsys):
    np.savez(tmp_path / "bad.npz", **arrays)
    command = ["train", "--run", str(tmp_path / "run"), "--data", str(tmp_path), "--config", CONFIG,
               "--config.data.name=npz:bad.npz", "--config.partition.clients=4",
               "--config.cohort.size=2", "--config.rounds=1"]
    refused(capsys, command, message)
    assert not (tmp_path / "run").exists()


def test_npz_files_with_a_wrong_byte(tmp_path):
    """Whatever byte it is, a file is read, or refused as one kind of error."""
    np.savez_compressed(tmp_path / "a.npz", inputs=FEATURES, labels=LABELS)
    content, refusals = (tmp_path / "a.npz").read_bytes(), 0
    for i in range(len(content)):
        (tmp_path / "b.npz").write_bytes(
            content[:i] + bytes([content[i] ^ 1 << i % 8]) + content[i + 1 :]
        )
        try:
            disk.read_npz(tmp_path / "b.npz")
        except ValueError:
            refusals += 1
    assert refusals > len(content) // 3


@pytest.mark.parametrize(("arrays", "message"), [
    ({"s_idx": [0, 1, 2], "s_off": [0, 2, 5]}, "split s: offsets from 0 to 5 for 3 positions"),
    ({"s_idx": [0, 1, 2], "s_off": [1, 2, 3]}, "offsets from 1 to 3 for 3 positions: expected them "
                                               "from 0 to 3"),
    ({"s_idx": [0, 1, 2], "s_off": [0, 2, 1, 3]}, "offsets fall from 2 to 1 at client 1"),
    ({"s_idx": [0, 1, 2], "s_off": np.zeros(0, int)}, "offsets of no client"),
    ({"s_idx": [0, 1, 2**32], "s_off": [0, 3]}, "a partition that owns"),
    ({"s_idx": [0, 1, -1], "s_off": [0, 3]}, "a partition that owns"),
    ({"s_idx": [0.5, 1, 2], "s_off": [0, 3]}, "s_idx is float64"),
    ({"s_idx": [[0, 1]], "s_off": [0, 2]}, "s_idx is int64 of shape .1, 2.; expected a row"),
    ({"s_off": [0, 2]}, "has s_off but no s_idx"),
    ({"s_idx": np.array([{}]), "s_off": [0, 1]}, "cannot read released splits"),
    ({"t_idx": [0], "t_off": [0, 1]}, "unknown released split 's': expected one of t"),
    ({}, "unknown released split 's'"),
])
def test_released_splits(arrays, message, tmp_path):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ff.UsageError, match=message):
        released(tmp_path / "a.npz", "s")


def test_a_good_released_split_is_read_as_it_is(tmp_path):
    np.savez(tmp_path / "a.npz", s_idx=np.array([4, 2, 0], np.uint16), s_off=np.array([0, 1, 1, 3]))
    found = released(tmp_path / "a.npz", "s")
    np.testing.assert_array_equal(found.sizes, [1, 0, 2])
    np.testing.assert_array_equal(found.client(2), [2, 0])


@pytest.mark.parametrize(("arguments", "message"), [
    ("curvature RUN --examples -1", "--examples = -1: expected 0 or more"),
    ("curvature RUN --client 0 --split own --examples -1", "--examples = -1: expected 0 or more"),
    ("curvature RUN --client 0 --split own --examples 5", "--examples 5 would change nothing"),
    ("curvature RUN --clients -7", "--clients = -7: expected 1 or more"),
    ("curvature RUN --clients 2 --examples -1", "--examples = -1: expected 0 or more"),
    ("curvature RUN --clients 2 --top 7", "--top 7 would change nothing: --clients measures"),
    ("curvature RUN --clients 2 --float64", "--float64 would change nothing"),
    ("curvature RUN --client 2 --model swa", "--model swa would change nothing: a client makes"),
    ("curvature RUN --seed 4294967296", "--seed = 4294967296: expected 0 to 4294967295"),
    ("curvature RUN --seed -1", "--seed = -1: expected 0 to 4294967295"),
    ("landscape --surface RUN --seed 4294967296", "--seed = 4294967296: expected 0 to"),
    ("landscape --surface RUN --points 0", "points = 0: expected 1 or more"),
    ("landscape --surface RUN --points 1000000001", "1000000001 x 1000000001 points needs .* GB"),
    ("landscape --surface RUN --radius inf", "radius = inf: expected a finite number"),
    ("landscape --surface RUN --radius nan", "radius = nan: expected a finite number"),
    ("landscape --surface RUN --radius 1e300", "radius = 1e.300: expected a finite number"),
    ("landscape --surface RUN --radius -1", "radius = -1.0: expected more than 0"),
    ("landscape --plane RUN RUN RUN --points 0", "points = 0: expected 2 or more"),
    ("landscape --plane RUN RUN RUN --points -3", "points = -3: expected 2 or more"),
    ("landscape --plane RUN RUN RUN --points 1000000000", "points needs .* Ask for fewer points"),
    ("landscape --plane RUN RUN RUN --radius 5", "--radius 5.0 would change nothing: it is of "
                                                 "--surface, not of --plane"),
    ("landscape --plane RUN RUN RUN --seed 3", "--seed 3 would change nothing"),
    ("landscape --line RUN RUN --client 3", "--client 3 would change nothing: it is of --surface, "
                                            "not of --line"),
    ("landscape --line RUN RUN --points 1", "points = 1: expected 2 or more"),
    ("landscape --line RUN RUN --points 10000000000", "points needs .* Ask for fewer points"),
    ("landscape --surface RUN --client 1 --model swa", "--model swa would change nothing"),
    ("compare RUN --figure a.xyz", r"figure a.xyz: .xyz is no format of pictures; expected .*.png"),
    ("compare RUN --figure a", "figure a: a name without a suffix is no format"),
    ("compare RUN --figure", "expected one of"),
    ("compare RUN --figure RUN/metrics.jsonl/a.png", "a.png cannot be written: "),
    ("compare RUN --target nan", "--target = nan: expected a finite number"),
    ("compare RUN --target inf", "--target = inf: expected a finite number"),
    ("compare UNTRAINED", "has no trained round yet, .*: train it, or put another run first"),
    ("compare UNTRAINED RUN", "has no trained round yet"),
])
def test_commands(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = config.to_json(small_config())
    start = {"round": 0, "split": "test", "model": "global", "loss": 1.0, "accuracy": 0.5}
    cohort = start | {"round": 1, "split": "cohort", "model": "local", "drift": 0.1,
                      "bytes_up": 1, "bytes_down": 1}
    for name, records in (("RUN", [start, cohort, start | {"round": 1}]), ("UNTRAINED", [start])):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(text)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    words = arguments.split() + ([""] if arguments.endswith("--figure") else [])
    refused(capsys, words, message)


def test_runs_with_a_gap_are_compared(tmp_path, capsys):
    """Curves of seeds of which one has lost some rounds: the rounds that all have."""
    from fedjax_flat.report import curves

    record = lambda t: {"round": t, "split": "test", "model": "global", "loss": 1.0, "accuracy": t}
    seeds = [[record(t) for t in (1, 2, 3)], [record(t) for t in (1, 3)]]
    rounds, mean, _ = curves.mean_curve(seeds, split="test")
    assert list(rounds) == [1, 3]
    assert list(mean) == [1, 3]


@pytest.mark.parametrize(("call", "message"), [
    (lambda p: p.client(epochs=0), "epochs = 0: expected 1 or more"),
    (lambda p: p.client(epochs=-3), "epochs = -3: expected 1 or more"),
    (lambda p: p.client(batch_size=0), "batch_size = 0: expected 1 or more"),
    (lambda p: p.client(steps=0), "steps = 0: expected 1 or more"),
    (lambda p: ff.client.sgd(-1), "learning rate = -1: expected 0 or more"),
    (lambda p: ff.client.sgd(float("nan")), "learning rate = nan: expected 0 or more"),
    (lambda p: ff.client.sgd(0.1, momentum=1.5), "momentum = 1.5: expected 0 or more and less"),
    (lambda p: ff.client.sgd(0.1, weight_decay=-1.0), "weight_decay = -1.0: expected 0 or more"),
    (lambda p: ff.client.sgd(0.1, clip=-1.0), "clip = -1.0: expected 0 or more"),
    (lambda p: ff.server.sgd(-1.0), "server learning rate = -1.0: expected 0 or more"),
    (lambda p: ff.server.adaptive("adam", -1.0), "server learning rate = -1.0"),
    (lambda p: ff.server.swa(10**12, 5), "start = 1000000000000"),
    (lambda p: dirichlet([0, 1], 1, alpha=float("inf"), seed=0), "cannot be negative or infinite"),
    (lambda p: Partition(np.arange(3, dtype=np.int32), np.array([0, 2])).check(5),
     "offsets from 0 to 2 for 3 positions"),
    (lambda p: ff.landscape.symmetric(float("inf"), 3), "radius = inf"),
])
def test_functions(call, message):
    with pytest.raises(ff.UsageError, match=message):
        call(PROBLEM)


PROBLEM = Problem((5, 5))


def test_lanczos_that_is_not_deep_enough():
    import jax
    import jax.numpy as jnp

    operator = ff.curvature.Operator(lambda v: v, 50, jnp.float32, lambda v: v)
    with pytest.raises(ff.UsageError, match="depth = 3: expected 5 or more"):
        ff.curvature.lanczos(operator, 5, key=jax.random.key(0), depth=3)
    with pytest.raises(ff.UsageError, match="iterations = 0: expected 1 or more"):
        ff.curvature.power_iteration(operator, 1, key=jax.random.key(0), iterations=0)


@pytest.mark.parametrize("capture", ["lowest", "released"])
@pytest.mark.parametrize(("start", "cycle"), [(1, 1), (1, 5), (5, 5), (7, 5), (10, 3), (3, 10)])
def test_the_first_model_of_swa_is_where_it_was(start, cycle, capture):
    from fedjax_flat.server.averaging import _CAPTURES

    rounds = range(1, start + 2 * cycle + 2)
    expected = next(t for t in rounds if _CAPTURES[capture](t, start, cycle))
    assert ff.server.swa(start, cycle, capture=capture).first == expected


def test_optimisers_still_take_schedules():
    assert ff.client.sgd(lambda t: 0.1).init({}) is not None
    assert ff.server.sgd(optax.constant_schedule(0.1)).init({}) is not None
