"""Entries: a config.json, or an object within it, read with types, so that every mistake is named as it stands there.

Imports no torch: a config.json is judged before that is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from pagewick.errors import ModelLoadError

# Far above any model there is; a larger number is a corrupt file, not a model.
MAX_SIZE: Final = 2**24
MAX_LAYERS: Final = 1000


class Entries:
    """The entries of `values`. An entry that is null counts as missing.

    path: where `values` stands in config.json, such as "text_config". aliases: what the file may call an entry instead,
    for families that had names of their own before there were common ones.
    Every reader raises ModelLoadError, which names the entry, what it is and what it must be.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "", aliases: Mapping[str, str] | None = None) -> None:
        self.values = values
        self._path = path
        self._aliases = dict(aliases or {})

    def renamed(self, aliases: Mapping[str, str]) -> Entries:
        """The same entries, some of which the file may call otherwise: common name -> name in the file."""
        return Entries(self.values, self._path, aliases)

    def filled(self, defaults: Mapping[str, Any]) -> Entries:
        """The same entries, and those of `defaults` that are not there; what is null stays so."""
        return Entries({**defaults, **self.values}, self._path, self._aliases)

    def without_null(self, names: Collection[str]) -> Entries:
        """The same entries, of which those in `names` are missing if they are null, so that they can be filled."""
        kept = {name: value for name, value in self.values.items() if value is not None or name not in names}
        return Entries(kept, self._path, self._aliases)

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
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not _is_whole(value) or not 0 < value <= most:
            raise self.wrong(name, f"a whole number from 1 to {most}")
        return int(value)

    def optional_size(self, name: str) -> int | None:
        return self.size(name) if name in self else None

    def count(self, name: str, default: int | None = None, *, most: int = MAX_SIZE) -> int:
        """A whole number from 0 to `most`."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not _is_whole(value) or not 0 <= value <= most:
            raise self.wrong(name, f"a whole number from 0 to {most}")
        return int(value)

    def positive(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not _is_number(value) or value <= 0:
            raise self.wrong(name, "a number above 0")
        return float(value)

    def optional_positive(self, name: str) -> float | None:
        return self.positive(name) if name in self else None

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not _is_number(value):
            raise self.wrong(name, "a number")
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def choice(self, name: str, known: Collection[str], default: str | None = None) -> str:
        """One of `known`; whatever else there may be in the world is not supported, and said to be so."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or value not in known:
            raise self.wrong(name, f"one of {', '.join(sorted(known))}: others are not supported")
        return value

    def demand(self, name: str, supported: object, default: object, why: str = "") -> None:
        """Raises ModelLoadError unless the entry, `default` if it is missing, is the one value that is supported."""
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
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(_is_whole(one) and least <= one <= MAX_SIZE for one in value):
            raise self.wrong(name, f"a list of whole numbers from {least} to {MAX_SIZE}")
        return tuple(value)

    def numbers(self, name: str) -> tuple[float, ...] | None:
        """A list of finite numbers; None if it is missing."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(_is_number(one) for one in value):
            raise self.wrong(name, "a list of numbers")
        return tuple(float(one) for one in value)

    def texts(self, name: str) -> tuple[str, ...] | None:
        """A list of strings; None if it is missing."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self.wrong(name, "a list of strings")
        return tuple(value)

    def wrong(self, name: str, expected: str) -> ModelLoadError:
        """The error for an entry that is there but impossible, or missing."""
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
