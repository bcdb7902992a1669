"""Entries: typed access to a config.json, or to an object within it, which reports every mistake by its entry's name.

Imports no torch: a config.json is checked before torch is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, TypeVar

from pagewick.errors import ModelLoadError

# Far above any existing model; a larger number means that the file is corrupt.
MAX_SIZE: Final = 2**24
MAX_LAYERS: Final = 1000

_Value = TypeVar("_Value")


class Entries:
    """The entries of `values`. An entry that is null counts as missing.

    path: where `values` stands in config.json, such as "text_config". aliases: common name -> name in the file, for
    families whose entries have names of their own. found: the values that were read so far, with the families' defaults
    for entries that are missing, by both names.
    Every reader raises ModelLoadError, which names the entry, its value and the values that are possible.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        path: str = "",
        aliases: Mapping[str, str] | None = None,
        found: dict[str, Any] | None = None,
    ) -> None:
        self.values = values
        self.found: dict[str, Any] = {} if found is None else found
        self._path = path
        self._aliases = dict(aliases or {})

    def renamed(self, aliases: Mapping[str, str]) -> Entries:
        """Return these entries for a file that may have other names for some: common name -> name in the file."""
        return Entries(self.values, self._path, aliases, self.found)

    def filled(self, defaults: Mapping[str, Any]) -> Entries:
        """Return these entries with `defaults` for those that the file leaves out; a null entry stays null."""
        return Entries({**defaults, **self.values}, self._path, self._aliases, self.found)

    def replaced(self, values: Mapping[str, Any]) -> Entries:
        """Return these entries with other values for some."""
        return Entries({**self.values, **values}, self._path, self._aliases, self.found)

    def without_null(self, names: Collection[str]) -> Entries:
        """Return these entries without those in `names` that are null, so that they can be filled."""
        kept = {name: value for name, value in self.values.items() if value is not None or name not in names}
        return Entries(kept, self._path, self._aliases, self.found)

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def __iter__(self) -> Iterator[str]:
        return (name for name, value in self.values.items() if value is not None)

    def get(self, name: str) -> Any:
        """The entry as it is, None if it is missing."""
        value = self.values.get(name)
        if value is None and name in self._aliases:
            return self.values.get(self._aliases[name])
        return value

    def size(self, name: str, default: int | None = None, *, most: int = MAX_SIZE) -> int:
        """A whole number from 1 to `most`."""
        return self._whole(name, default, 1, most)

    def optional_size(self, name: str) -> int | None:
        return self.size(name) if name in self else None

    def count(self, name: str, default: int | None = None, *, most: int = MAX_SIZE) -> int:
        """A whole number from 0 to `most`."""
        return self._whole(name, default, 0, most)

    def _whole(self, name: str, default: int | None, least: int, most: int) -> int:
        expected = f"a whole number from {least} to {most}"
        return self._read(name, default, lambda it: _is_whole(it) and least <= it <= most, expected)

    def positive(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._read(name, default, lambda it: _is_number(it) and it > 0, "a number above 0")
        return self._found(name, float(value))

    def optional_positive(self, name: str) -> float | None:
        return self.positive(name) if name in self else None

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number."""
        return self._found(name, float(self._read(name, default, _is_number, "a number")))

    def flag(self, name: str, default: bool | None = None) -> bool:
        return self._read(name, default, lambda it: isinstance(it, bool), "true or false")

    def text(self, name: str, default: str | None = None) -> str:
        return self._read(name, default, lambda it: isinstance(it, str), "a string")

    def choice(self, name: str, known: Collection[str], default: str | None = None) -> str:
        """One of `known`; the error for another value says that it is not supported."""
        expected = f"one of {', '.join(sorted(known))}: others are not supported"
        return self._read(name, default, lambda it: isinstance(it, str) and it in known, expected)

    def _read(self, name: str, default: _Value | None, is_right: Callable[[Any], bool], expected: str) -> _Value:
        value = self.get(name)
        if value is None and default is not None:
            value = default
        elif not is_right(value):
            raise self.wrong(name, expected)
        return self._found(name, value)  # type: ignore[no-any-return]

    def _found(self, name: str, value: _Value) -> _Value:
        self.found |= dict.fromkeys((name, self._aliases.get(name, name)), value)
        return value

    def demand(self, name: str, supported: object, default: object, why: str = "") -> None:
        """Raise ModelLoadError unless the entry, `default` if it is missing, is the one value that is supported."""
        value = self.get(name)
        if (default if value is None else value) != supported:
            raise self.wrong(name, f"{supported!r}: {why or 'other values are not supported'}")

    def child(self, name: str) -> Entries | None:
        """An object within this one; None if it is missing."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object")
        return Entries(value, self._full(name))

    def sizes(self, name: str, *, least: int = 1) -> tuple[int, ...] | None:
        """A list of whole numbers from `least` to MAX_SIZE; None if it is missing."""
        expected = f"a list of whole numbers from {least} to {MAX_SIZE}"
        return self._list(name, lambda it: _is_whole(it) and least <= it <= MAX_SIZE, expected)

    def numbers(self, name: str) -> tuple[float, ...] | None:
        """A list of finite numbers; None if it is missing."""
        found = self._list(name, _is_number, "a list of numbers")
        return None if found is None else tuple(map(float, found))

    def texts(self, name: str) -> tuple[str, ...] | None:
        """A list of strings; None if it is missing."""
        return self._list(name, lambda it: isinstance(it, str), "a list of strings")

    def _list(self, name: str, is_right: Callable[[Any], bool], expected: str) -> tuple[Any, ...] | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(map(is_right, value)):
            raise self.wrong(name, expected)
        return tuple(value)

    def wrong(self, name: str, expected: str) -> ModelLoadError:
        """The error for an entry that is missing or has an impossible value."""
        called = name
        if name in self._aliases and self.values.get(name) is None and self.values.get(self._aliases[name]) is not None:
            called = self._aliases[name]
        value = self.get(name)
        shown = "missing" if value is None else f"{value!r}"[:80]
        return ModelLoadError(f"config.json: {self._full(called)} is {shown}, and must be {expected}")

    def _full(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    # A comparison, because a whole number may be too large to become a float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
