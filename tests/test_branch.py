"""A run that branches off another has the bits that it would have from scratch."""

import functools
import json
import re
import shutil

import pytest
from conftest import assert_same_bits, small_config
from test_loop import untimed

import fedjax_flat as ff
from fedjax_flat import cli
from fedjax_flat.run import branch, metrics
from fedjax_flat.run.checkpoint import Checkpoints
from fedjax_flat.run.run_folder import RunFolder

train = functools.partial(ff.train, progress=False)
SWA = {"server__average": "swa", "server__swa__start": 5.0, "server__swa__cycle": 2}
BOTH = {**SWA, "server__average": "swa+wima", "server__wima__window": 2}
# State on the server and with the clients, and records of every client.
METHOD = {"algorithm__name": "scaffold", "client__weight_decay": 1e-3, "eval__clients": True,
          "checkpoint__keep": 9}


def config_of(**settings):
    return small_config(rounds=8, **METHOD, **settings)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A finished run without averages; checkpoints of rounds 2, 4, 6, 8."""
    folder = tmp_path_factory.mktemp("runs") / "base"
    train(config_of(), folder)
    return folder


@pytest.fixture
def copy(base, tmp_path):
    """The same, to be changed."""
    return shutil.copytree(base, tmp_path / "copy")


def test_from_scratch_and_from_a_checkpoint_are_the_same_bits(base, tmp_path, caplog):
    whole = train(config_of(**BOTH), tmp_path / "whole")
    new = tmp_path / "new"
    with caplog.at_level("INFO", "fedjax_flat"):
        branched = train(config_of(**BOTH), new, start_from=f"{base}@4")
    assert "goes on from round 4" in caplog.text
    assert "WIMA averages fewer models than its window until round 6" in caplog.text
    assert_same_bits(whole.state, branched.state)
    assert_same_bits(whole.models, branched.models)
    known = lambda records: [r for r in untimed(records) if r["model"] != "wima" or r["round"] > 5]
    assert known(whole.records) == untimed(branched.records)
    clients = lambda run: known(metrics.read(RunFolder(run).clients_file))
    assert clients(new) == clients(tmp_path / "whole")
    came = branch.origin_of(RunFolder(new))
    saved = Checkpoints(base / "checkpoints")
    assert came == branch.Origin(str(base), 4, saved.digest(4))
    saved.close()
    assert branch.origin_of(RunFolder(base)) is None

    third = train(config_of(**BOTH), tmp_path / "third", start_from=f"{new}@6")  # amid averages
    assert_same_bits(whole.state, third.state)
    again = train(config_of(**BOTH), new, start_from=f"{base}@4")  # the same command goes on
    assert_same_bits(again.state, branched.state)
    with pytest.raises(ff.UsageError, match=r"already holds a run, which began with .*base@4\. Le"):
        train(config_of(**BOTH), new, start_from=f"{base}@2")
    with pytest.raises(ff.UsageError, match="already holds a run, which began by itself"):
        train(config_of(**BOTH), tmp_path / "whole", start_from=f"{base}@4")


@pytest.mark.slow
def test_a_branch_of_a_branch_and_one_that_was_cut_short(base, tmp_path, monkeypatch):
    """From a run with SWA back to one without; a killed start is made again."""
    both, plain = tmp_path / "both", tmp_path / "plain"
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(config_of(**BOTH), both, start_from=f"{base}@2")
    assert not RunFolder(both).config_file.exists()
    with pytest.raises(ff.UsageError, match="began with"):
        train(config_of(**BOTH), both, start_from=f"{base}@4")
    shorter = config_of(**BOTH)
    shorter.rounds, shorter.eval.window = 6, 1
    train(shorter, both, start_from=base)  # begun with round 2, which is not the newest
    assert branch.origin_of(RunFolder(both)).round == 2
    back = train(config_of(), plain, start_from=f"{both}@4")
    assert_same_bits(back.state, ff.load_run(base).state)
    assert {r["model"] for r in back.records} == {"global", "local"}


REFUSED = [
    ({"client__learning_rate": 0.05}, "@4", r"client\.learning_rate: 0\.1 -> 0\.05\nTrain it from"),
    ({"client__sharpness": "sam", "seed": 1}, "@4", r"sharpness: 'none' -> 'sam'\n  seed: 0 -> 1"),
    ({"algorithm__name": "fedavg"}, "@4", "algorithm.name: 'scaffold' -> 'fedavg'"),
    ({"partition__alpha": 0.1}, "@4", r"partition\.alpha: 0\.5 -> 0\.1"),
    (SWA, "", r"base@8: up .*\n  server\.swa\.start: 5 here, .*later.*\nThis .*base@4\."),
    ({**SWA, "server__swa__start": 4.0}, "@4", r"start: 4 here.*\nThis .*base@2\."),
    ({**SWA, "server__swa__start": 1.0}, "@2", r"start: 1 here.*\n.*keeps no checkpoint that"),
    ({"server__average": "wima", "server__wima__window": 4}, "@6", r"divisor of 6\n.*@8\."),
    ({}, "@3", r"no checkpoint of round 3; it has 2, 4, 6, 8"),
    ({}, "@0", r"no checkpoint of round 0"),
    ({"rounds": 5}, "@6", r"base@6 is past rounds = 5"),
    ({}, "x@", r"expected RUN or RUN@ROUND"),
    ({}, "@last", r"expected RUN or RUN@ROUND"),
    ({}, "/none", r"is not a run folder"),
]


@pytest.mark.parametrize(("settings", "where", "message"), REFUSED)
def test_what_would_not_have_trained_alike_is_refused(base, tmp_path, settings, where, message):
    config = small_config(**({"rounds": 8} | METHOD | settings))
    with pytest.raises(ff.UsageError, match=message):
        train(config, tmp_path / "new", start_from=f"{base}{where}")
    assert not (tmp_path / "new").exists()


def test_other_clients_kernels_and_no_checkpoint(copy, tmp_path):
    begin = functools.partial(train, config_of(**SWA), tmp_path / "new", start_from=f"{copy}@4")
    environment = copy / "environment.json"
    before = environment.read_text()
    environment.write_text(json.dumps(json.loads(before) | {"kernels": "another"}))
    with pytest.raises(ff.UsageError, match="trained with convolutions of another"):
        begin()
    environment.write_text(before)
    other = ff.build(config_of(partition__alpha=5.0)).partition
    other.save(copy / "partition.npz")
    with pytest.raises(ff.UsageError, match="trained with other clients"):
        begin()
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(ff.UsageError, match="has no checkpoint yet: train it first"):
        begin()
    assert not (copy / "checkpoints").exists()


def test_on_the_command_line(base, tmp_path, capsys):
    """Without --config, the settings are those of the run that it branches off."""
    command = ["train", "--quiet", "--run", str(tmp_path / "new"), "--from", f"{base}@6",
               "--config.eval.window=1"]
    assert cli.main(command) == 0
    assert re.search(r"global +test +\d", capsys.readouterr().out)
    last = lambda run: untimed(metrics.read(run / "metrics.jsonl"))[-3:]
    assert last(tmp_path / "new") == last(base)
    assert {r["round"] for r in last(base)} == {8}
    assert cli.main([*command, "--config.seed=3"]) == cli.EXIT_USAGE
    assert "holds a run with another config" in capsys.readouterr().err
