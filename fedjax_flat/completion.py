"""What a shell needs to complete commands, their flags, files and names of configs (shtab)."""

import argparse

import shtab

from fedjax_flat import errors
from fedjax_flat.config_files import shipped

SHELLS = ("bash", "zsh")
_PATHS = ("FILE", "RUN", "FOLDER", "RUN|FILE", "RUN[@ROUND]")


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """A script for `shell`, of all that `parser` knows."""
    errors.lookup("shell", shell, dict.fromkeys(SHELLS))
    for command in _commands(parser).values():
        for action in command._actions:
            kind: dict[str, str] | None = None
            if action.dest == "config":
                kind = dict.fromkeys(SHELLS, "_fedjax_flat_configs")
            elif action.metavar in _PATHS or action.dest in ("run", "data", "out"):
                kind = shtab.FILE
            if kind:
                action.complete = kind  # type: ignore[attr-defined]
    names = " ".join(shipped())
    preamble = {
        "bash": f'_fedjax_flat_configs() {{ compgen -W "{names}" -- "$1"; compgen -f -- "$1"; }}',
        "zsh": "_fedjax_flat_configs() { _alternative "
               f"'configs:config:({names})' 'files:file:_files' }}",
    }
    return shtab.complete(parser, shell, preamble=preamble)


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (found,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return found.choices
