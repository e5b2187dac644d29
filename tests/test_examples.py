"""Every command says how it is called, and what it says parses."""

import argparse
import re
import shlex

import pytest

from fedjax_flat import cli
from fedjax_flat.examples import EXAMPLES, FIRST

COMMANDS = next(
    a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction)
).choices


def test_every_command_has_some():
    assert set(COMMANDS) == set(EXAMPLES)
    assert all(words(line)[0] == name for name, lines in EXAMPLES.items() for line in lines)


def words(line):
    """What the program is given, of a line that may be the shell's."""
    inside = re.sub(r'eval "\$\((.*)\)"', r"\1", line).partition(">")[0]
    return shlex.split(inside, comments=True)[1:]


@pytest.mark.parametrize("line", [*FIRST, *(line for some in EXAMPLES.values() for line in some)])
def test_they_parse(line):
    args, rest = cli.parser().parse_known_args(words(line))
    assert callable(args.call)
    assert all(word.startswith("--config.") for word in rest)
    assert len(line) <= 98


def test_one_per_line(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", "--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert "examples:\n" in out
    assert all(f"\n  {line}\n" in out for line in EXAMPLES["train"])
