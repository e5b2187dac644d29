"""Errors meant for people: what was given, what was expected, how to fix it."""

import difflib
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


class UsageError(ValueError):
    """What the user gave cannot work. The command line prints it without a traceback."""


class DivergedError(RuntimeError):
    """Training turned non-finite; the message names the round and the last good checkpoint."""


def lookup(kind: str, name: str, table: Mapping[str, T]) -> T:
    """`table[name]`, or an error that lists the choices and suggests the nearest one."""
    if name in table:
        return table[name]
    raise UsageError(
        f"unknown {kind} {name!r}: expected one of {', '.join(sorted(table))}."
        + did_you_mean(name, table)
    )


def did_you_mean(name: str, choices) -> str:
    """A suggestion to append to an error message, or nothing when no choice is close."""
    near = difflib.get_close_matches(name, list(choices), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
