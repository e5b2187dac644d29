"""A setting: its default, what it may be, and one line on what it does."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedjax_flat import errors

COUNTABLE = 2**31  # in a compiled function, from 0 on


_EXAMPLES: dict[type, tuple] = {
    str: ("mine.py",), float: (0.5, 0.25), int: (64, 128),
    dict: ({"name": "head", "client.frozen": "features"},),
}


class Setting(NamedTuple):
    """`default` also says the type; whole numbers are taken for floats."""

    default: Any
    doc: str = ""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    choices: Sequence[Any] = ()
    items: type = str  # of a tuple that is empty by default

    def check(self, name: str, value: Any) -> None:
        """Refuses what this setting cannot be."""
        expected = type(self.default)
        allowed = (int, float) if expected is float else expected
        if not isinstance(value, allowed) or (isinstance(value, bool) and expected is not bool):
            raise errors.UsageError(
                f"{name} = {value!r} is a {type(value).__name__}; expected {expected.__name__}, "
                f"e.g. {self.default!r}."
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise errors.UsageError(
                f"{name} = {value}: expected a number that is finite, e.g. {self.default!r}."
            )
        if isinstance(value, tuple):
            self._check_items(name, value)
        if self.choices and value not in self.choices:
            raise errors.UsageError(
                f"{name} = {value!r}: expected one of {', '.join(map(str, self.choices))}."
                + errors.did_you_mean(str(value), map(str, self.choices))
            )
        below = self.below
        if below is None and self.at_most is None and isinstance(value, int):
            below = COUNTABLE
        bounds = (
            (self.at_least, lambda b: value >= b, "{} or more"),
            (self.above, lambda b: value > b, "more than {}"),
            (self.at_most, lambda b: value <= b, "at most {}"),
            (below, lambda b: value < b, "less than {}"),
        )
        for bound, holds, text in bounds:
            if bound is not None and not holds(bound):
                raise errors.UsageError(f"{name} = {value}: expected {text.format(_shown(bound))}.")

    def _check_items(self, name: str, value: tuple) -> None:
        kind = type(self.default[0]) if self.default else self.items
        for item in value:
            if type(item) is not kind and (type(item), kind) != (int, float):
                raise errors.UsageError(
                    f"{name} = {value!r}: {item!r} is a {type(item).__name__}; expected "
                    f"{kind.__name__}s, e.g. {self.default or _EXAMPLES[kind]!r}."
                )

    @property
    def range(self) -> str:
        """What `check` lets pass, for people: '0 <= x < 1'."""
        if self.choices:
            return " | ".join(map(str, self.choices))
        low = next((f"{_shown(b)} {sign} " for b, sign in ((self.at_least, "<="), (self.above, "<"))
                    if b is not None), "")
        high = next((f" {sign} {_shown(b)}" for b, sign in ((self.at_most, "<="), (self.below, "<"))
                     if b is not None), "")
        return f"{low}x{high}" if low or high else type(self.default).__name__


def _shown(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


Settings = Mapping[str, Setting]


def check_options(kind: str, settings: Settings, options: Mapping[str, Any]) -> None:
    """Refuses an option that is unknown or cannot be what it is."""
    for name, value in options.items():
        if name not in settings:
            has = f"expected {', '.join(settings)}" if settings else "it has none"
            raise errors.UsageError(
                f"{kind} has no setting {name!r}: {has}." + errors.did_you_mean(name, settings)
            )
        settings[name].check(f"{kind}.{name}", value)
