"""A setting: its default, what it may be, and one line on what it does."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedjax_flat import errors


class Setting(NamedTuple):
    """`default` also says the type; whole numbers are taken for floats."""

    default: Any
    doc: str = ""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    choices: Sequence[Any] = ()

    def check(self, name: str, value: Any) -> None:
        """Refuses what this setting cannot be."""
        expected = type(self.default)
        allowed = (int, float) if expected is float else expected
        if not isinstance(value, allowed) or (isinstance(value, bool) and expected is not bool):
            raise errors.UsageError(
                f"{name} = {value!r} is a {type(value).__name__}; expected {expected.__name__}, "
                f"e.g. {self.default!r}."
            )
        if isinstance(value, float) and math.isnan(value):
            raise errors.UsageError(f"{name} = nan: expected a number, e.g. {self.default!r}.")
        if self.choices and value not in self.choices:
            raise errors.UsageError(
                f"{name} = {value!r}: expected one of {', '.join(map(str, self.choices))}."
                + errors.did_you_mean(str(value), map(str, self.choices))
            )
        bounds = (
            (self.at_least, lambda b: value >= b, "{:g} or more"),
            (self.above, lambda b: value > b, "more than {:g}"),
            (self.at_most, lambda b: value <= b, "at most {:g}"),
            (self.below, lambda b: value < b, "less than {:g}"),
        )
        for bound, holds, text in bounds:
            if bound is not None and not holds(bound):
                raise errors.UsageError(f"{name} = {value}: expected {text.format(bound)}.")

    @property
    def range(self) -> str:
        """What `check` lets pass, for people: '0 <= x < 1'."""
        if self.choices:
            return " | ".join(map(str, self.choices))
        low = next((f"{b:g} {sign} " for b, sign in ((self.at_least, "<="), (self.above, "<"))
                    if b is not None), "")
        high = next((f" {sign} {b:g}" for b, sign in ((self.at_most, "<="), (self.below, "<"))
                     if b is not None), "")
        return f"{low}x{high}" if low or high else type(self.default).__name__


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
