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


def printable(text: str) -> str:
    """`text` with whatever a terminal would obey or cannot show written out, as in '\\x1b[31m'."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def at_least(name: str, value: float, least: float) -> None:
    """Refuses a number below `least`."""
    if not value >= least:
        raise UsageError(f"{name} = {value}: expected {least} or more.")


def finite(name: str, value: float) -> None:
    """Refuses what is not a number, or larger than single precision holds."""
    if not abs(value) < 3e38:
        raise UsageError(f"{name} = {value}: expected a finite number.")


def seed(name: str, value: int) -> None:
    """Refuses a seed that would be another one's: 32 bits of it count."""
    if not 0 <= value < 2**32:
        raise UsageError(f"{name} = {value}: expected 0 to {2**32 - 1}.")


def positive(name: str, value: float) -> None:
    """Refuses a number that is not above 0, or not finite."""
    finite(name, value)
    if not value > 0:
        raise UsageError(f"{name} = {value}: expected more than 0.")


def below_one(name: str, value: float) -> None:
    """Refuses a number outside [0, 1)."""
    if not 0 <= value < 1:
        raise UsageError(f"{name} = {value}: expected 0 or more and less than 1.")
