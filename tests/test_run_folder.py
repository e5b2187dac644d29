"""A run folder that is shared, damaged or not ours: nothing is lost, and what is gone is said."""

import contextlib
import functools
import json
import os
import pathlib
import re
import shutil
import warnings

import numpy as np
import pytest
from conftest import assert_same_bits, small_config

import fedjax_flat as ff
from fedjax_flat import cli, disk
from fedjax_flat.data import Partition
from fedjax_flat.run import environment, loop, mark, metrics
from fedjax_flat.run.run_folder import RunFolder

CONFIG = str(pathlib.Path(__file__).parents[1] / "configs" / "digits_fedavg.py")


@functools.cache
def built():
    return ff.build(small_config(rounds=4))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of four rounds; tests work on copies."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    ff.train(small_config(rounds=4), folder, progress=False)
    return folder


@pytest.fixture
def run(trained, tmp_path):
    return pathlib.Path(shutil.copytree(trained, tmp_path / "run"))


def start(run, **options):
    """What a training does before its first round: (round, state) that it would go on from."""
    chosen = {"allow_other_kernels": False, "fresh": False, "init": None, **options}
    files = loop._Files(built(), run, **chosen)
    with files.explained(), contextlib.closing(files):
        done, state = files.restore(lambda: None)
        files.begin(done)
    return done, state


def flip(path, at=0.5):
    content = bytearray(path.read_bytes())
    content[int(at * len(content))] ^= 0x80
    path.write_bytes(content)


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


# --- whose folder it is ---


def test_fresh_deletes_what_this_program_wrote_and_nothing_else(run, tmp_path, caplog):
    ours = {p.relative_to(run) for p in run.rglob("*")}
    mine = {"thesis.tex", "figures/mine.png", "checkpoints/notes.txt", "landscape/paper.png",
            "curvature/results.json", "config.json.bak", "figures/clients_a.png/mine.txt"}
    for name in mine:
        (run / name).parent.mkdir(exist_ok=True, parents=True)
        (run / name).write_text("years of work")
    for name in ("curvature/global_train10_lanczos5.npz", "landscape/.partial-x.vectors",
                 "landscape/surface_a.html", "imports/0_mine.py", "tensorboard/events.out.1",
                 "metrics.csv", "export/global_round2.npz", "wandb/latest-run",
                 "masks/swa_round3_test6.png",
                 "wandb/offline-run-1/files/config.yaml"):
        (run / name).parent.mkdir(exist_ok=True, parents=True)
        (run / name).write_text("ours")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "0_kept.py").write_text("not in the run folder")
    shutil.rmtree(run / "imports")
    (run / "imports").symlink_to(elsewhere)
    with RunFolder(run).in_use():
        RunFolder(run).delete()
    left = {str(p.relative_to(run)) for p in run.rglob("*") if p.is_file()}
    assert left == {*mine, mark.LOCK}
    assert "thesis.tex" in caplog.text
    assert (elsewhere / "0_kept.py").exists()
    assert len(ours) > 20


@pytest.mark.parametrize("config", ["{}", '{"model": "of another program"}', None])
def test_fresh_refuses_a_folder_without_the_mark(run, capsys, config):
    (run / mark.MARK).unlink()
    if config:
        (run / "config.json").write_text(config)
    before = sorted(run.rglob("*"))
    command = ["train", "--run", str(run), "--config", CONFIG, "--fresh", "--yes"]
    assert cli.main(command) == cli.EXIT_USAGE
    assert re.search("was not made by this program .*is marked when it is resumed",
                     capsys.readouterr().err)
    assert sorted(run.rglob("*")) == before


def test_a_run_of_an_earlier_version_is_marked_when_it_is_resumed(run):
    (run / mark.MARK).unlink()
    assert start(run)[0] == 4
    assert mark.read(run)["config"]["rounds"] == 4


def test_fresh_waits_for_nobody_and_deletes_nothing_that_is_in_use(run, capsys):
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    command = ["train", "--run", str(run), "--config", CONFIG, "--fresh", "--yes"]
    with RunFolder(run).in_use():
        assert cli.main(command) == cli.EXIT_USAGE
    assert f"another process is training in {run}" in capsys.readouterr().err
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before


def test_fresh_deletes_nothing_when_the_experiment_cannot_be_built(run, capsys):
    command = ["train", "--run", str(run), "--config", CONFIG, "--fresh", "--yes",
               "--config.data.name=npz:nowhere.npz"]
    assert cli.main(command) == cli.EXIT_USAGE
    assert (run / "checkpoints" / "4").is_dir()


def test_fresh_starts_from_the_beginning(run):
    assert start(run, fresh=True)[0] == 0
    assert start(run.parent / "new", fresh=True)[0] == 0


@pytest.mark.parametrize("name", ["metrics.jsonl", "partition.npz", "checkpoints/2"])
def test_a_folder_that_looks_like_a_run_but_is_none_is_left_alone(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("of another program")
    with pytest.raises(ff.UsageError, match=f"has {name} but is not a run of this program"):
        start(tmp_path)
    assert (tmp_path / name).read_text() == "of another program"


@pytest.mark.parametrize(("name", "message"), [
    ("", "run folder '': expected a path, e.g. runs/a"),
    ("runs/a[1]", r"'\[' in its path; checkpoints there cannot be read back"),
    ("runs/a*", "Choose another name"),
    ("a\\b", "Choose another name"),
    ("a\udc80", r"'\\udc80' in its path"),
    ("a\0b", "expected a path, e.g. runs/a"),
    ("x" * 300, "a name of 300 letters is too long"),
])
def test_names_that_cannot_hold_a_run(name, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ff.UsageError, match=message):
        start(name)
    assert not list(tmp_path.iterdir())
    if "\0" not in name:
        for command in ("train", "compare", "curvature", "clients"):
            flag = ["--run"] if command == "train" else []
            assert cli.main([command, *flag, name]) == cli.EXIT_USAGE
            message = capsys.readouterr().err
            assert message.startswith("fedjax-flat: ")
            assert "Traceback" not in message


# --- what is damaged is made again, or done without ---

DAMAGE = [
    ("config.json", cut, "config.json cannot be read .*the copy in .fedjax_flat_run.json is taken"),
    ("config.json", flip, "config.json cannot be read"),
    ("config.json", pathlib.Path.unlink, "config.json cannot be read"),
    ("environment.json", cut, "environment.json: cannot be read and is written anew"),
    ("environment.json", flip, "written anew, without earlier commands; as it was it is "
                               "environment.json.damaged"),
    ("partition.npz", cut, "partition.npz is damaged and was made again, as its recorded hash"),
    ("partition.npz", flip, "partition.npz is damaged"),
    ("partition.npz", pathlib.Path.unlink, "partition.npz is missing and was made again, as its "
                                           "recorded hash tells"),
    ("metrics.jsonl", functools.partial(flip, at=0.01),
     "metrics.jsonl: line 1 cannot be read and is left out; as it was it is metrics.jsonl.damaged"),
    ("metrics.jsonl", cut, r"metrics.jsonl has lost the records of round [23](-4)?; training goes"),
    ("metrics.jsonl", pathlib.Path.unlink, "metrics.jsonl has lost the records of round 1-4"),
]


@pytest.mark.parametrize(("name", "how", "message"), DAMAGE)
def test_damage_is_said_and_training_goes_on(run, trained, name, how, message):
    before = (run / name).read_bytes()
    how(run / name)
    with pytest.warns(UserWarning, match=message):
        done, state = start(run)
    assert done == 4
    assert_same_bits(state, ff.load_run(trained).state)
    if name in ("config.json", "partition.npz"):
        assert (run / name).read_bytes() == before
    if name != "metrics.jsonl":
        assert start(run)[0] == 4, "once is enough: the second time there is nothing to say"


def test_environment_that_is_gone_never_stops_a_run(run):
    (run / "environment.json").unlink()
    assert start(run)[0] == 4
    assert len(environment.read(run / "environment.json")["commands"]) == 1
    (run / "environment.json").write_text('["no object"]')
    with pytest.warns(UserWarning, match="environment.json: cannot be read"):
        assert start(run)[0] == 4


def test_a_damaged_mark_is_no_reason_to_stop(run):
    flip(run / mark.MARK)
    assert mark.read(run) == {}
    assert mark.is_marked(run)
    assert start(run)[0] == 4
    assert mark.read(run)["partition"] == built().partition.content_hash


@pytest.mark.parametrize("text", [
    "[]", '{"imports": [5]}', '{"imports": 5}', '{"no_such_setting": 1}', '{"rounds": "x"}', "\0",
])
def test_a_config_that_is_none(run, text):
    (run / "config.json").write_text(text)
    with pytest.warns(UserWarning, match="config.json cannot be read .*: the copy in .* is taken"):
        assert RunFolder(run).config().rounds == 4
    mark.write(run, config={"no_such_setting": 1})  # of another version
    with pytest.raises(ff.UsageError, match="cannot be read as the settings of a run"):
        RunFolder(run).config()


def test_settings_that_are_lost_everywhere_can_be_given_again(run):
    cut(run / "config.json")
    (run / mark.MARK).write_text("{}")
    with pytest.raises(ff.UsageError, match=r"cannot be read as the settings .*its whole config"):
        RunFolder(run).config()
    with pytest.warns(UserWarning, match="config.json: cannot be read .*compared with nothing"):
        assert start(run)[0] == 4
    cut(run / "config.json")
    (run / mark.MARK).unlink()  # an earlier version's: its clients tell that it is ours
    with pytest.warns(UserWarning, match="config.json: cannot be read"):
        assert start(run)[0] == 4
    cut(run / "config.json")
    (run / mark.MARK).unlink()
    (run / "partition.npz").unlink()
    with pytest.raises(ff.UsageError, match="cannot be read as the settings of a run"):
        start(run)


def test_the_config_given_is_compared_with_the_copy(run):
    (run / "config.json").unlink()
    other = ff.build(small_config(rounds=4, client__learning_rate=0.2))
    with pytest.warns(UserWarning, match="copy in"), pytest.raises(
        ff.UsageError, match=r"another config:\n  client.learning_rate: 0.1 -> 0.2"
    ):
        RunFolder(run).open(other.config, other.partition)


def test_a_setting_that_changed_by_itself_is_noticed(run):
    text = (run / "config.json").read_text()
    (run / "config.json").write_text(text.replace('"learning_rate": 0.1', '"learning_rate": 0.3'))
    with pytest.raises(ff.UsageError, match=r"is not what the run was trained with:\n  "
                                            r"client.learning_rate: 0.1 -> 0.3\nPut it back"):
        RunFolder(run).config()
    (run / "config.json").write_text(text.replace('"rounds": 4', '"rounds": 6'))
    assert RunFolder(run).config().rounds == 6, "how long to train may be changed"


def test_clients_that_changed_are_refused_however_they_are_recorded(run):
    other = Partition.of([np.arange(k, 1000, 20) for k in range(20)])
    with pytest.raises(ff.UsageError, match="trained with other clients"):
        RunFolder(run).open(built().config, other)
    (run / "partition.npz").unlink()
    with pytest.raises(ff.UsageError, match="trained with other clients"):
        RunFolder(run).open(built().config, other)
    (run / mark.MARK).unlink()
    with pytest.raises(ff.UsageError, match="trained with other clients"):
        RunFolder(run).open(built().config, other)
    (run / "environment.json").unlink()
    with pytest.warns(UserWarning, match="made again, but no hash of it is recorded"):
        RunFolder(run).open(built().config, built().partition)


def test_a_damaged_run_is_trained_to_the_end_with_the_same_bits(run, tmp_path):
    """All of it at once, and the table at the end: the last evaluation is made again."""
    for name in ("environment.json", "config.json", "partition.npz"):
        cut(run / name)
    (run / "metrics.jsonl").unlink()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        finished = ff.train(small_config(rounds=4), run, progress=False)
    assert len(said) == 4
    assert [r["round"] for r in finished.records] == [4]
    assert finished.score(2)[2] == 1
    with pytest.warns(UserWarning, match="has lost the records of round 1-4"):
        result = ff.train(small_config(rounds=6), run, progress=False)
    whole = ff.train(small_config(rounds=6), tmp_path / "whole", progress=False)
    assert_same_bits(result.state, whole.state)


def test_lost_records_of_clients_are_said(tmp_path):
    config = small_config(rounds=2, eval__clients=True)
    ff.train(config, tmp_path / "a", progress=False)
    (tmp_path / "a" / "clients.jsonl").unlink()
    with pytest.warns(UserWarning, match=r"clients.jsonl has lost the records of round 0-2"):
        ff.train(config, tmp_path / "a", progress=False)


def test_reading_metrics_with_a_damaged_line(run, capsys):
    flip(run / "metrics.jsonl")
    with pytest.warns(UserWarning, match=r"line \d cannot be read"):
        assert len(metrics.read(run / "metrics.jsonl")) > 4
    assert metrics.ranges([9, 3, 4, 5]) == "3-5, 9"


def test_one_wrong_name_does_not_rename_the_score():
    record = {"round": 1, "split": "test", "model": "global", "loss": 1.0, "accuracy": 0.5}
    damaged = {("accuracx" if k == "accuracy" else k): v for k, v in record.items()}
    assert metrics.score_name([damaged, record, record]) == "accuracy"
    assert metrics.score_name([{k: v for k, v in record.items() if k != "accuracy"}]) == "accuracy"


# --- links ---


def test_planted_links_are_not_followed(run, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("years of work")
    (run / mark.LOCK).unlink()
    (run / mark.LOCK).symlink_to(victim)
    with pytest.raises(ff.UsageError, match=r"\.lock is a symbolic link, which is not followed"):
        start(run)
    (run / mark.LOCK).unlink()
    for name in ("metrics.jsonl", "config.json", "environment.json", "partition.npz", mark.MARK):
        (run / f"{name}.partial").symlink_to(victim)
        (run / f".partial-{name}").symlink_to(victim)
    assert start(run)[0] == 4
    assert victim.read_text() == "years of work"
    (run / mark.MARK).unlink()
    (run / mark.MARK).symlink_to(victim)
    assert not mark.is_marked(run), "a link is no mark"


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with contextlib.suppress(KeyError), disk.whole(path) as partial:
        partial.write_text("half")
        raise KeyError
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    disk.write_atomically(path, "new")
    assert path.read_text() == "new"
    assert json.dumps(path.stat().st_mode & 0o600) == json.dumps(0o600)
