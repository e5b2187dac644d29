"""Every command that takes a run folder, on folders that are none or are broken: one sentence."""

import argparse
import json
import os
import warnings

import pytest
from conftest import small_config

import fedjax_flat as ff
from fedjax_flat import cli
from fedjax_flat.experiment import config
from fedjax_flat.run import branch
from fedjax_flat.run.run_folder import RunFolder

TEXT = config.to_json(small_config())


def commands():
    """Those whose first argument is a run folder, or several, with what else they must have."""
    (found,) = (a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction))
    for name, parser in found.choices.items():
        names = [a.dest for a in parser._actions if not a.option_strings]
        required = [a for a in parser._actions if a.option_strings and a.required]
        if names[:1] in (["run"], ["runs"]):
            yield name, [x for a in required for x in (a.option_strings[0], fitting(a))]


def fitting(option):
    if option.type in (int, float):
        return "1"
    return "page.html" if option.dest == "out" else "RUN"


ALSO = {"landscape": ["--surface"]}
COMMANDS = {name: [*more, *ALSO.get(name, [])] for name, more in commands()}


def nothing(path):
    """No such folder."""


def file(path):
    path.write_text("a letter")


def empty(path):
    path.mkdir()


def other(path):
    path.mkdir()
    (path / "thesis.tex").write_text("mine")


def loop(path):
    path.symlink_to(path)


def with_config(text):
    def make(path):
        path.mkdir()
        (path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())

    return make


def folder_for_config(path):
    (path / "config.json").mkdir(parents=True)


def changed(**settings):
    return json.dumps({**json.loads(TEXT), **settings})


def broken_checkpoints(path):
    with_config(TEXT)(path)
    (path / "checkpoints" / "4").mkdir(parents=True)
    (path / "checkpoints" / "4" / "state").write_bytes(b"\0" * 10)


def broken_metrics(path):
    with_config(TEXT)(path)
    (path / "metrics.jsonl").write_bytes(b"\xff\xfe{]\n" * 5)


NO_RUN = {
    "nothing": nothing, "a file": file, "empty": empty, "another folder": other, "a loop": loop,
    "config cut": with_config(TEXT[: len(TEXT) // 2]), "config empty": with_config(""),
    "config a list": with_config("[1, 2]"), "config a number": with_config("3"),
    "config bytes": with_config(b"\xff\xfe\0\0"), "config deep": with_config("[" * 100_000),
    "config of another": with_config('{"model": "of another program"}'),
    "config a folder": folder_for_config,
    "config without rounds": with_config(changed(rounds="many")),
    "unknown setting": with_config(changed(colour="red")),
}
UNTRAINED = {"no checkpoint": with_config(TEXT),
             "config out of range": with_config(changed(seed=-1)),
             "checkpoints broken": broken_checkpoints, "metrics broken": broken_metrics}


def say(capsys, argv):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = cli._show_warning
        code = cli.main(argv)
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith("fedjax-flat: warning: ")]
    assert "Traceback" not in out + err
    assert "\x1b" not in out + err
    return code, lines


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_no_run(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind, make in NO_RUN.items():
        run = tmp_path / f"{kind}\x1b[31m"
        make(run)
        more = [word.replace("RUN", str(run)) for word in COMMANDS[name]]
        code, lines = say(capsys, [name, str(run), *more])
        assert (code, len(lines)) == (cli.EXIT_USAGE, 1), (kind, lines)
        assert lines[0].startswith("fedjax-flat: "), (kind, lines)
        assert kind in lines[0], lines
        made = os.listdir(run) if run.is_dir() else []
        assert set(made) <= {"thesis.tex", "config.json"}, "nothing is written there"


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_not_trained(name, tmp_path, capsys, monkeypatch):
    """A table or a page of settings may come of it; else one sentence."""
    monkeypatch.chdir(tmp_path)
    for kind, make in UNTRAINED.items():
        run = tmp_path / kind
        make(run)
        more = [word.replace("RUN", str(run)) for word in COMMANDS[name]]
        code, lines = say(capsys, [name, str(run), *more])
        if code:
            assert (code, len(lines)) == (cli.EXIT_USAGE, 1), (kind, lines)
            assert kind in lines[0] or "config.seed = -1" in lines[0], lines


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]", '{"cells": 3, "choose_by": "x"}'])
def test_plans_of_sweeps(text, tmp_path, capsys):
    (tmp_path / "sweep.json").write_text(text)
    code, lines = say(capsys, ["table", str(tmp_path)])
    assert (code, len(lines)) == (cli.EXIT_USAGE, 1)
    assert "cannot be read as the plan of a sweep" in lines[0]
    assert "Delete that file and give the sweep again" in lines[0]


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]", "3", '{"runs": 1}', "\0"])
def test_small_files_that_inform_never_stop_a_run(text, tmp_path):
    folder = RunFolder(tmp_path)
    for path, read in (
        (folder.init_file, folder.init), (folder.features_file, folder.features),
        (folder.origin_file, lambda: branch.origin_of(folder)),
    ):
        assert read() is None
        path.write_text(text)
        with pytest.warns(UserWarning, match=f"{path.name} cannot be read .* is done without"):
            assert read() is None


def test_with_which_model_a_run_began_can_be_said_again(tmp_path):
    folder = RunFolder(tmp_path / "b")
    folder.path.mkdir()
    folder.init_file.write_text("{")
    with pytest.warns(UserWarning, match="is done without"):
        folder.check_init(tmp_path / "a")
    assert folder.init() == tmp_path / "a"
    with pytest.raises(ff.UsageError, match="--init counts before the first round only"):
        folder.check_init(tmp_path / "c")


@pytest.mark.parametrize("name", COMMANDS)
def test_options_that_nobody_knows(name, capsys):
    for argv, said in (
        ([name], "required"), ([name, "a", "--no-such-option"], "no-such-option"),
        ([name, ""], "''"), ([name, "a\0b"], r"a\x00b"), ([name, "x" * 300], "xxx"),
    ):
        more = [word.replace("RUN", "b") for word in COMMANDS[name]] if len(argv) > 1 else []
        try:
            code = cli.main([*argv, *more])
        except SystemExit as e:  # argparse's own
            code = e.code
        err = capsys.readouterr().err
        assert code == cli.EXIT_USAGE, argv
        assert "Traceback" not in err
        assert said in err, err
