"""Sets of texts as expressions, with intersections and complements, that are matched in a time linear in the text.

The derivative of a set by a character is what may follow that character in the set's texts. It is an expression again
(J. A. Brzozowski, Derivatives of Regular Expressions, Journal of the ACM 11, 1964); a text is in a set if the empty
text is in its derivative by all characters. Equal expressions are one object that remembers its derivatives, so that
matching many texts becomes a walk through an automaton whose states arise as they are needed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, Final, Protocol

# Steps to build and derive the expressions of one object, below a second. Expressions in use need some hundreds.
_MAX_STEPS: Final = 200_000


class TooComplexError(Exception):
    """An expression has too many derivatives."""


class CharacterSet(Hashable, Protocol):
    def __contains__(self, character: str) -> bool: ...


class Language:
    """A set of texts. Only Languages makes them; equal ones of one object are identical."""

    __slots__ = ("derivatives", "has_empty", "kind", "parts")

    def __init__(self, kind: str, parts: Any, has_empty: bool) -> None:
        """kind: the operation. parts: its operands, hashable. has_empty: whether the empty text is in the set."""
        self.kind, self.parts, self.has_empty = kind, parts, has_empty
        self.derivatives: dict[str, Language] = {}


class Languages:
    """Builds sets of texts, and derives them. All methods raise TooComplexError after too many steps."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, Any], Language] = {}
        self._num_steps = 0
        self.nothing = self._make("either", frozenset(), False)
        self.empty = self._make("empty", None, True)
        self.everything = self._make("not", self.nothing, True)

    def character(self, characters: CharacterSet) -> Language:
        """Return the texts of one character of a set."""
        return self._make("character", characters, False)

    def then(self, first: Language, second: Language) -> Language:
        """Return the texts that begin with one of the first set and go on with one of the second."""
        if first is self.nothing or second is self.nothing:
            return self.nothing
        if first is self.empty or second is self.empty:
            return second if first is self.empty else first
        if first.kind == "then":
            # Nested to the right, so that equal sequences are equal expressions.
            head, tail = first.parts
            return self.then(head, self.then(tail, second))
        return self._make("then", (first, second), first.has_empty and second.has_empty)

    def either(self, languages: Iterable[Language]) -> Language:
        """Return the texts that are in one of the sets or more."""
        found = self._flat("either", languages, self.nothing)
        if self.everything in found:
            return self.everything
        return next(iter(found)) if len(found) == 1 else self._make("either", found, any(f.has_empty for f in found))

    def both(self, languages: Iterable[Language]) -> Language:
        """Return the texts that are in all of the sets."""
        found = self._flat("both", languages, self.everything)
        if not found or self.nothing in found:
            return self.nothing if found else self.everything
        return next(iter(found)) if len(found) == 1 else self._make("both", found, all(f.has_empty for f in found))

    def others(self, language: Language) -> Language:
        """Return the texts that are not in the set."""
        if language.kind == "not":
            inner: Language = language.parts
            return inner
        return self._make("not", language, not language.has_empty)

    def times(self, language: Language, least: int, most: int | None) -> Language:
        """Return the texts that consist of `least` to `most` texts of the set, any number if `most` is None."""
        least = 0 if language.has_empty else least
        if most == 0 or language is self.empty or (language is self.nothing and not least):
            return self.empty
        if language is self.nothing or (least, most) == (1, 1):
            return language
        return self._make("times", (language, least, most), not least)

    def has(self, language: Language, text: str) -> bool:
        """Return whether a text is in a set."""
        for character in text:
            language = language.derivatives.get(character) or self._derive(language, character)
            if language is self.nothing or language is self.everything:
                break
        return language.has_empty

    def _derive(self, language: Language, character: str) -> Language:
        found = language.derivatives.get(character)
        if found is None:
            found = language.derivatives[character] = self._derivative(language, character)
        return found

    def _derivative(self, language: Language, character: str) -> Language:
        self._count(1)
        match language.kind, language.parts:
            case "character", characters:
                return self.empty if character in characters else self.nothing
            case "then", (first, second):
                found = self.then(self._derive(first, character), second)
                return self.either((found, self._derive(second, character))) if first.has_empty else found
            case "times", (inner, least, most):
                rest = self.times(inner, max(0, least - 1), None if most is None else most - 1)
                return self.then(self._derive(inner, character), rest)
            case "either", parts:
                return self.either(self._derive(part, character) for part in parts)
            case "both", parts:
                return self.both(self._derive(part, character) for part in parts)
            case "not", inner:
                return self.others(self._derive(inner, character))
        return self.nothing

    def _flat(self, kind: str, languages: Iterable[Language], neutral: Language) -> frozenset[Language]:
        found: set[Language] = set()
        for language in languages:
            found.update(language.parts if language.kind == kind else (language,))
        self._count(len(found))
        return frozenset(found - {neutral})

    def _make(self, kind: str, parts: Any, has_empty: bool) -> Language:
        found = self._known.get((kind, parts))
        if found is None:
            self._count(1)
            found = self._known[kind, parts] = Language(kind, parts, has_empty)
        return found

    def _count(self, num_steps: int) -> None:
        self._num_steps += num_steps
        if self._num_steps > _MAX_STEPS:
            raise TooComplexError
