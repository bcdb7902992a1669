"""Settings: typed access to a quantization_config. Every mistake is reported by its entry's name. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

from pagewick.errors import ModelLoadError
from pagewick.weights.name_patterns import Matches, PatternError, Place, matcher_of

_MAX_SIZE: Final = 2**24


class Settings:
    """The entries of an object in config.json; one that is null counts as missing. path: where the object stands.

    file: the file that has it, if it is another one. Every reader raises ModelLoadError, which names the entry, its
    value and the values that are possible.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "quantization_config", file: str = "config.json") -> None:
        self.values, self.path, self.file = values, path, file

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def get(self, *names: str) -> Any:
        """Return the first of these entries that is there, as it is; None if none is."""
        return next((self.values[name] for name in names if name in self), None)

    def choice(self, name: str, known: Collection[Any], default: Any = None) -> Any:
        """Return one of `known`, all of one type; an entry without default must be there."""
        value = self.values.get(name)
        value = default if value is None else value
        if value not in known or type(value) is not type(next(iter(known))):
            raise self.wrong(name, f"one of {', '.join(map(str, known))}: others are not supported")
        return value

    def word(self, name: str, known: Collection[str], default: str | None = None) -> str:
        """Return one of the lower-case words `known`, which the file may write in capital letters."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, str) or value.lower() not in known:
            raise self.wrong(name, f"one of {', '.join(known)}: others are not supported")
        return value.lower()

    def size(self, name: str, default: int | None = None) -> int:
        """Return a whole number above 0."""
        value = self.values.get(name)
        value = default if value is None else value
        if type(value) is not int or not 0 < value <= _MAX_SIZE:
            raise self.wrong(name, "a whole number above 0")
        return value

    def group_size(self, name: str = "group_size", default: int | None = None) -> int:
        """Return the number of columns that share a scale, -1 for all of a row."""
        return -1 if self.values.get(name, default) == -1 else self.size(name, default)

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of strings; empty if the entry is missing."""
        value = self.values.get(name)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self.wrong(name, "a list of strings")
        return tuple(value)

    def child(self, name: str) -> Settings | None:
        """Return the object within this one; None if it is missing."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object")
        return Settings(value, f"{self.path}.{name}", self.file)

    def children(self, name: str) -> Iterator[tuple[str, Settings]]:
        """Yield the objects in an object, with their names."""
        found = self.child(name)
        for key in found.values if found is not None else ():
            inner = found.child(key) if found is not None else None
            if inner is not None:
                yield key, inner

    def demand(self, name: str, supported: Collection[Any]) -> None:
        """Raise ModelLoadError unless an entry is missing or has one of the values that are supported."""
        if name in self and self.values[name] not in supported:
            raise self.wrong(name, f"one of {', '.join(map(str, supported))}: other values are not supported")

    def pattern(self, name: str, pattern: str, place: Place) -> Matches:
        """Return the function that says whether a regular expression in an entry matches the name of a module.

        The function raises ModelLoadError, too.
        """
        try:
            matches = matcher_of(pattern, place)
        except PatternError as error:
            raise self._wrong_pattern(name, pattern, error) from error

        def checked(module: str) -> bool:
            try:
                return matches(module)
            except PatternError as error:
                raise self._wrong_pattern(name, pattern, error) from error

        return checked

    def _wrong_pattern(self, name: str, pattern: str, error: PatternError) -> ModelLoadError:
        return ModelLoadError(
            f"{self.path}.{name} in {self.file}: {pattern[:200]!r} {error}\n"
            "  write a simpler expression there, or the names of the modules"
        )

    def wrong(self, name: str, expected: str) -> ModelLoadError:
        """Return the error for an entry that is missing or has an impossible value."""
        shown = f"is {self.values[name]!r}"[:100] if name in self else "is missing"
        return ModelLoadError(f"{self.path}.{name} in {self.file} {shown}, and must be {expected}")


def named(names: Collection[str]) -> Callable[[str], bool]:
    """Return whether a list such as modules_to_not_convert names a weight by its prefix.

    An entry is a whole name, or some of its neighbouring components: "lm_head", "mlp.gate", "model.layers.0".
    """
    entries = [f".{name.strip('.')}." for name in names if name.strip(".")]

    def is_named(prefix: str) -> bool:
        return any(entry in f".{prefix}." for entry in entries)

    return is_named
