"""Runs in phases: one after the other by hand, stopped anywhere or not, it is the same bits."""

import functools
import json
import shutil
import signal

import pytest
from conftest import assert_same_bits, small_config
from test_loop import untimed

import fedjax_flat as ff
from fedjax_flat import cli
from fedjax_flat.experiment import config as config_lib
from fedjax_flat.report.clients import clients
from fedjax_flat.report.compare import compare
from fedjax_flat.report.costs import by_phase, costs, spent
from fedjax_flat.run import loop, mark, metrics, phases
from fedjax_flat.run.run_folder import RunFolder

train = functools.partial(ff.train, progress=False)
COMMON = {"rounds": 2, "eval__every": 1, "eval__window": 1, "checkpoint__every": 1,
          "cohort__size": 10, "model__hidden": (12,)}
NAMES = ["1_fed3r", "2_fedavg_head", "3_all"]


def closed(**settings):
    return ff.only_used(small_config(
        algorithm__name="fed3r", cohort__sampling="once", data__features=True,
        client__batch_size=100, **COMMON, **settings,
    ))


def trained(**settings):
    return ff.only_used(small_config(**{"task__temperature": 0.1, **COMMON, **settings}))


def three(**last):
    """In closed form, then the head on its features, then all of the network."""
    return ff.pipeline({
        "fed3r": closed(),
        "fedavg(head)": trained(data__features=True, client__learning_rate=0.02),
        "all": trained(client__learning_rate=0.01, **last),
    })


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A cache of features, and `whole`, a run in three phases."""
    folder = tmp_path_factory.mktemp("phases")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDJAX_FLAT_CACHE", str(folder / "cache"))
        train(three(), folder / "whole")
        yield folder


@pytest.fixture
def copy(folder, tmp_path):
    """The same, elsewhere and to be changed."""
    return shutil.copytree(folder / "whole", tmp_path / "copy")


@pytest.mark.slow
def test_by_hand_it_is_the_same(folder):
    whole, configs = folder / "whole", ff.phase_configs(three())
    assert [p.path.name for p in RunFolder(whole).phases] == NAMES
    before = None
    for name, place in zip(configs, NAMES, strict=True):
        alone = train(configs[name], folder / "alone" / place, init=before)
        before = folder / "alone" / place
        assert_same_bits(alone.state, ff.load_run(whole / place).state)
        assert untimed(alone.records) == untimed(metrics.read(whole / place / "metrics.jsonl"))
    choose = r"is a run in phases: choose one of them, .*1_fed3r, "
    with pytest.raises(ff.UsageError, match=choose):
        ff.load_run(whole)
    with pytest.raises(ff.UsageError, match=choose):
        clients(str(whole))
    with pytest.raises(ff.UsageError, match=choose):
        train(configs["all"], folder / "branch", start_from=whole)


@pytest.mark.parametrize("stop", [
    pytest.param(n, marks=() if n == 3 else pytest.mark.slow) for n in range(1, 7)
])
def test_stopped_and_resumed_anywhere(folder, tmp_path, monkeypatch, stop):
    """A signal in every round in turn, in the last of a phase too; then the same command."""
    run, rounds = tmp_path / "run", []
    real = loop.Loop.check_finite

    def check(self, infos, done):
        rounds.extend([done] * len(infos.drift))
        if len(rounds) == stop:
            signal.raise_signal(signal.SIGTERM)
        real(self, infos, done)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Loop, "check_finite", check)
        first = train(three(), run)
    assert first.stopped_by == (signal.SIGTERM if stop < 6 else None)
    assert first.phase == ["fed3r", "fedavg(head)", "all"][(stop - 1) // 2]
    assert len(RunFolder(run).phases) == (stop + 1) // 2
    moved = shutil.move(run, tmp_path / "moved")
    again = train(three(), moved)
    assert again.stopped_by is None
    assert_same_bits(again.state, ff.load_run(folder / "whole/3_all").state)
    assert untimed(again.records) == untimed(phases.records(RunFolder(folder / "whole")))
    assert spent(moved / NAMES[2]) == spent(folder / "whole" / NAMES[2])


@pytest.mark.parametrize("when", [
    pytest.param("before its folder", marks=pytest.mark.slow), "before its settings"
])
def test_killed_between_phases(folder, tmp_path, monkeypatch, when):
    class KilledError(Exception):
        pass

    def die(*args, **kwargs):
        raise KilledError

    real = RunFolder.record
    with monkeypatch.context() as patch:
        if when == "before its folder":
            patch.setattr(loop, "load_run", die)
        else:  # with a checkpoint of round 0, which the next start makes again
            def record(self, *args):
                return die() if self.path.name == NAMES[1] else real(self, *args)

            patch.setattr(RunFolder, "record", record)
        with pytest.raises(KilledError):
            train(three(), tmp_path / "run")
    assert not (tmp_path / "run" / NAMES[1] / "config.json").exists()
    again = train(three(), tmp_path / "run")
    assert_same_bits(again.state, ff.load_run(folder / "whole/3_all").state)


def test_records_are_on_one_axis(folder, tmp_path):
    whole = folder / "whole"
    found = phases.records(RunFolder(whole))
    assert metrics.phase_ends(found) == {"fed3r": 2, "fedavg_head": 4, "all": 6}
    rounds, values = metrics.curve(found)
    assert rounds.tolist() == [0, 1, 2, 3, 4, 5, 6]
    for i, name in enumerate(NAMES):
        own = metrics.curve(metrics.read(whole / name / "metrics.jsonl"))[1]
        assert own[-1] == values[2 * (i + 1)]
    parts = [metrics.bytes_until(metrics.read(whole / n / "metrics.jsonl")) for n in NAMES]
    assert metrics.bytes_until(found, 4) == parts[0] + parts[1]
    assert spent(whole)[0] == sum(parts) == spent(whole / NAMES[2])[0]
    assert spent(whole)[1] == pytest.approx(spent(whole / NAMES[2])[1])
    assert metrics.window_mean(found, 5)[2] == 2, "rounds of the last phase alone"

    table = by_phase([whole])
    assert all(name in table for name in NAMES)
    assert "5-6" in table
    assert by_phase([whole / NAMES[0]]) == ""
    text = compare([str(whole / NAMES[0]), str(whole)], str(tmp_path / "a.png"), alike=2)
    for alike, message in ((2, "would change nothing: it is of --figure"), (5, "expected 1 to 4")):
        with pytest.raises(ff.UsageError, match=message):
            compare([str(whole)], alike=alike)
    assert table in text
    assert (tmp_path / "a.png").exists()
    assert table in costs([str(whole)], 0.5)


def test_what_has_begun_cannot_change(copy):
    changed = lambda i, **own: (*three().phases[:i], {**three().phases[i], **own},
                                *three().phases[i + 1:])
    config = three()
    for i, own, message in [
        (0, {"algorithm.fed3r.ridge": 1.0},
         r"phase fed3r of .* is finished and fedavg\(head\) has begun from its model.*\n.*ridge: "
         r"0\.01 -> 1\.0"),
        (1, {"rounds": 3}, r"fedavg\(head\).* is finished .*\n  rounds: 2 -> 3"),
        (2, {"client.learning_rate": 0.5}, r"phase all of .* has begun; .*\n.*0\.01 -> 0\.5"),
        (2, {"name": "other"}, r"has a phase 3_all, and config\.phases has not: .*3_other"),
    ]:
        config.phases = changed(i, **own)
        with pytest.raises(ff.UsageError, match=message):
            train(config, copy)
    config.phases = three().phases[:2]
    with pytest.raises(ff.UsageError, match="has a phase 3_all"):
        train(config, copy)
    with pytest.raises(ff.UsageError, match="holds a run with another config"):
        train(trained(), copy)
    with pytest.raises(ff.UsageError, match="holds a run without phases"):
        train(three(), copy / NAMES[2])
    with pytest.raises(ff.UsageError, match="began with its own model"):
        train(three(), copy, init=copy / NAMES[2])
    with pytest.raises(ff.UsageError, match=r"--from .* does not go with phases"):
        train(three(), copy, start_from=copy / NAMES[2])
    with RunFolder(copy).in_use(), pytest.raises(ff.UsageError, match="another process is train"):
        train(three(), copy)


@pytest.mark.slow
def test_longer_and_further(copy):
    """The last phase may go on, and others may follow."""
    config = three(rounds=3)
    assert int(train(config, copy).state.round) == 3
    config.phases = (*config.phases, {"name": "more", "client.frozen": "head", "rounds": 1,
                                      "data.features": False, "client.learning_rate": 0.01})
    result = train(config, copy)
    assert result.phase == "more"
    assert metrics.phase_ends(result.records)["more"] == 8
    assert RunFolder(copy / "4_more").init() == copy / "3_all"


def test_fresh_deletes_every_phase_and_nothing_else(copy, capsys):
    (copy / "mine.txt").write_text("x")
    (copy / "2_mine").mkdir()
    (copy / NAMES[1] / "mine.txt").write_text("x")
    command = ["train", "--quiet", "--run", str(copy), "--fresh"]
    assert cli.main(command) == cli.EXIT_USAGE
    assert "a run up to round 2 of phase 3_all" in capsys.readouterr().err
    RunFolder(copy).delete()
    left = {str(p.relative_to(copy)) for p in copy.rglob("*") if p.name != ".lock"}
    assert left == {"mine.txt", "2_mine", NAMES[1], f"{NAMES[1]}/mine.txt"}


@pytest.mark.slow
def test_on_the_command_line(tmp_path, capsys):
    file = tmp_path / "c.py"
    file.write_text(
        "import fedjax_flat as ff\n"
        "def get_config():\n"
        "    c = ff.default_config()\n"
        "    c.rounds, c.eval.every, c.eval.window, c.model.hidden = 1, 1, 1, (12,)\n"
        "    c.phases = ({'name': 'a'}, {'name': 'b(head)', 'client.frozen': 'features'})\n"
        "    return c\n"
    )
    run = tmp_path / "run"
    command = ["train", "--quiet", "--config", str(file), "--run", str(run)]
    wrong = [
        ("phases.c.rounds=2", "unknown phase 'c'"), ("phases.3.rounds=2", "unknown phase '3'"),
        ("phases.a.raunds=2", "no setting 'raunds'. Did you mean 'rounds'"),
        ("phases.a=2", "expected --config.phases.PHASE.NAME=VALUE"),
        ("phases.a.rounds=x", "rounds"), ("phases.a.phases=1", "a phase has no phases"),
        ("phases.a.client.rho=0.5", "phase a: config.client.rho = 0.5 would change nothing"),
        ("client.rho=0.5", "config.client.rho = 0.5 would change nothing: no phase uses it"),
    ]
    for text, message in wrong:
        assert cli.main([*command, f"--config.{text}"]) == cli.EXIT_USAGE
        assert message in capsys.readouterr().err, text
    options = ["--config.client.epochs=2", "--config.phases.a.client.epochs=1",
               "--config.phases.2.rounds=2"]
    assert cli.main([*command, *options]) == 0
    printed = capsys.readouterr().out
    assert "2_b_head" in printed
    assert "2-3" in printed
    assert (run / "figures/score.png").exists()
    written = json.loads((run / "config.json").read_text())
    assert written["phases"] == [
        {"name": "a", "client.epochs": 1},
        {"name": "b(head)", "client.frozen": "features", "rounds": 2},
    ]
    assert written["client"]["epochs"] == 2
    assert cli.main(["train", "--quiet", "--run", str(run)]) == 0  # resumes, with nothing to do
    assert cli.main([*command[:-1], str(tmp_path / "new"), *options, "--fresh"]) == 0
    assert cli.main(["costs", str(run), str(tmp_path / "new"), "--target", "10"]) == 0
    assert cli.main(["curvature", str(run)]) == cli.EXIT_USAGE
    assert "is a run in phases" in capsys.readouterr().err


def test_a_pipeline_has_the_configs_it_was_made_of(tmp_path):
    joined = three()
    own = [set(p) - {"name"} for p in joined.phases]
    assert "model.hidden" not in own[0] | own[1] | own[2]
    assert config_lib.flatten(joined)["model.hidden"] == (12,)
    again = config_lib.from_json(config_lib.to_json(joined))
    assert config_lib.differences(joined, again) == []
    for config in (joined, again):
        found = ff.phase_configs(config)
        made = {"fed3r": closed(),
                "fedavg(head)": trained(data__features=True, client__learning_rate=0.02),
                "all": trained(client__learning_rate=0.01)}
        assert {n: config_lib.used(c) for n, c in found.items()} == {
            n: config_lib.used(c) for n, c in made.items()
        }
    assert config_lib.differences(joined, three(seed=1)) != []
    with pytest.raises(ff.UsageError, match=r"config\.phases has 3 phases, each an experiment"):
        ff.build(joined)


WRONG = [
    ([{"name": "a"}, {"name": "a"}], "two phases have the name 'a'"),
    ([{"client.frozen": "head"}], "phase 1 has the name None"),
    ([{"name": "7"}], "phase 1 has the name '7'"),
    ([{"name": "a/b"}], "phase 1 has the name 'a/b'"),
    (["a"], "'a' is a str; expected dicts"),
    ([{"name": "a", "client.lerning_rate": 1.0}],
     r"phase a: config has no setting 'client\.lerning_rate'\. Did you mean 'client\.learning_rat"),
    ([{"name": "a", "algorithm.name": "fedavgg"}], "phase a: .*fedavgg.*Did you mean 'fedavg"),
    ([{"name": "a", "rounds": "many"}], "phase a: .*rounds|phase a: .*type"),
    ([{"name": "a", "rounds": 0}], "phase a: config.rounds = 0"),
    ([{"name": "a", "partition.clients": 7}], "phase a: config.partition.clients cannot be of one"),
    ([{"name": "a", "data.name": "mnist"}], "phase a: config.data.name cannot be of one"),
    ([{"name": "a", "client.rho": 0.7}], r"phase a: config\.client\.rho = 0\.7 would change noth"),
    ([{"name": "a"}, {"name": "b", "data.features": True}],
     "phase b has data.features after phase a, which has not"),
]


@pytest.mark.parametrize(("given", "message"), WRONG, ids=range(len(WRONG)))
def test_phases_that_cannot_be(given, message):
    with pytest.raises(ff.UsageError, match=message):
        ff.validate(small_config(phases=tuple(given)))


def test_common_settings_that_no_phase_takes():
    own = ({"name": "a", "client.epochs": 2}, {"name": "b", "client.epochs": 3})
    with pytest.raises(ff.UsageError, match=r"every phase that uses it has its own\. Change those: "
                       r"--config\.phases\.a\.client\.epochs, --config"):
        ff.validate(small_config(phases=own, client__epochs=4))
    with pytest.raises(ff.UsageError, match="there is no phase: expected one or more"):
        ff.pipeline({})


def test_phases_by_name():
    read = functools.partial(ff.read_phases, methods=("fed3r", "fedavg"),
                             parts_of_model=("head", "features"))
    assert read("fed3r+fedavg(head)") == {
        "fed3r": ("fed3r", ""), "fedavg(head)": ("fedavg", "head")
    }
    for text, message in [
        ("", "'' is no phase"), ("fed3r+", "'' is no phase"), ("fed3r(head", "is no phase"),
        ("fed3r+fedavgg", "unknown phase 'fedavgg'.*Did you mean 'fedavg'"),
        ("fedavg(haed)", "unknown part of the model 'haed'.*Did you mean 'head'"),
        ("fedavg+fedavg", "has fedavg twice"),
    ]:
        with pytest.raises(ff.UsageError, match=message):
            read(text)


def test_the_folder_of_a_phase_needs_no_quotes():
    assert mark.phase_name(2, "fedavg(head)") == "2_fedavg_head"
    assert mark.phase_name(1, "feddyn+fedmlb") == "1_feddyn+fedmlb"
