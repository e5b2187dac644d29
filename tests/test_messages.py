"""What people see: nothing that a terminal would obey, and one line even for our own mistakes."""

import json
import logging
import pathlib
import warnings

import pytest
from conftest import small_config

from fedjax_flat import cli, commands, errors
from fedjax_flat.experiment import config
from fedjax_flat.report import pictures, tables

RED = "a\x1b[31mred\n\u202efake\udc80"
ESCAPED = r"a\x1b[31mred\n\u202efake\udc80"


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "a\x1b[31mred"
    folder.mkdir()
    (folder / "config.json").write_text(config.to_json(small_config()))
    records = [
        {"round": 1, "split": "cohort", "model": "local", "drift": 0.1, "bytes_up": 1,
         "bytes_down": 1},
        {"round": 1, "split": "test", "model": "global", "loss": 1.0, "accuracy": 0.5},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(folder)


def test_printable():
    assert errors.printable(RED) == ESCAPED
    assert errors.printable("91.27 ± 0.40, \u00fc, \u4e2d") == "91.27 ± 0.40, \u00fc, \u4e2d"
    assert tables.table(["run"], [[RED]]).splitlines()[2] == ESCAPED
    assert tables.named("figure", RED) == f"figure: {ESCAPED}"


def test_run_names_are_printed_escaped(run, capsys):
    figure = pathlib.Path(run) / "a.png"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no glyph is missing
        assert cli.main(["compare", run, "--figure", str(figure)]) == 0
    out, _ = capsys.readouterr()
    assert r"a\x1b[31mred" in out
    assert "\x1b" not in out
    assert cli.main(["compare", run, "--split", "x\x1b"]) == cli.EXIT_USAGE
    assert cli.main(["curvature", run]) == cli.EXIT_USAGE
    assert "\x1b" not in capsys.readouterr().err


def test_warnings_and_logs_are_escaped(capsys):
    cli._show_warning(f"in {RED}", UserWarning, "file", 1)
    assert capsys.readouterr().err == f"fedjax-flat: warning: in {ESCAPED}\n".replace(
        r"\n", "\n", 1)
    record = logging.LogRecord("x", logging.INFO, "file", 1, "in %s", ("\x1b[31m",), None)
    assert cli._Printable("%(message)s").format(record) == r"in \x1b[31m"


@pytest.mark.parametrize(("name", "shown"), [
    ("a$b$", r"a\$b\$"), ("_hidden", " _hidden"), ("x" * 99, "x" * 40), ("\x1b", r"\x1b"),
])
def test_names_in_figures(name, shown):
    assert pictures.label(f"runs/{name}") == shown


def test_a_mistake_of_ours_is_one_line_and_a_file(run, capsys, monkeypatch):
    def mistaken(args, rest):
        raise RuntimeError("unexpected\x1b\nwith a second line")

    monkeypatch.setattr(commands, "compare", mistaken)
    assert cli.main(["compare", run]) == cli.EXIT_BUG
    said = capsys.readouterr().err
    assert said.startswith(r"fedjax-flat: RuntimeError: unexpected\x1b. This is a mistake of the "
                           "program; the traceback is in ")
    assert said.count("\n") == 1
    (path,) = pathlib.Path(run).glob("traceback-*.txt")
    text = path.read_text()
    assert "in mistaken" in text
    assert "with a second line" in text

    assert cli.main(["compare", "/nowhere/at/all"]) == cli.EXIT_BUG
    path = pathlib.Path(capsys.readouterr().err.strip().removesuffix(".").rpartition(" ")[2])
    assert "in mistaken" in path.read_text(), "where temporary files go"


def test_memory_that_does_not_suffice_is_no_mistake_of_ours(run, capsys, monkeypatch):
    def greedy(args, rest):
        raise MemoryError("Unable to allocate 74.5 GiB")

    monkeypatch.setattr(commands, "compare", greedy)
    assert cli.main(["compare", run]) == cli.EXIT_USAGE
    assert "there is not enough memory (Unable to allocate 74.5 GiB)" in capsys.readouterr().err
