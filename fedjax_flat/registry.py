"""Names and what they mean: one table per kind of thing, open to users' own files.

Our own modules fill the tables as they are imported, a user's file through `ff.register` (see
plugins.py). What is registered can be chosen by name in a config, and its settings set there.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from fedjax_flat import errors
from fedjax_flat.settings import Settings

T = TypeVar("T")


class Entry(NamedTuple):
    """A factory and its settings, which are keyword arguments of the factory."""

    make: Any
    settings: Settings
    doc: str


class Registry(Mapping[str, T], Generic[T]):
    """Read as a mapping, extended by `add`; a name is given once."""

    def __init__(self, kind: str):
        self.kind = kind
        self._table: dict[str, T] = {}

    def add(self, name: str, value: T) -> None:
        """Gives `name` a meaning."""
        if not name.replace("_", "").replace("-", "").isalnum():
            raise errors.UsageError(
                f"{self.kind} {name!r}: expected a name of letters, digits, - and _."
            )
        if name in self._table:
            raise errors.UsageError(
                f"two of one name: {self.kind} {name!r} is registered already. Choose another."
            )
        self._table[name] = value

    def remove(self, name: str) -> None:
        """Takes a name back, for tests and notebooks."""
        del self._table[name]

    def find(self, name: str) -> T:
        """The meaning of `name`, or an error that suggests the nearest."""
        return errors.lookup(self.kind, name, self._table)

    def __getitem__(self, name: str) -> T:
        return self._table[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


def entry(make: Any, settings: Settings | None = None) -> Entry:
    """A factory with its settings; the first line of its docstring says what it is."""
    return Entry(make, settings or {}, (make.__doc__ or "").strip().split("\n")[0])
