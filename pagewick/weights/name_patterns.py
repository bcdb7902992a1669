"""Regular expressions of checkpoints and adapters for names of modules, matched in a time that is linear in the name.

They are untrusted data, and Python's `re` may try exponentially many ways, as for (a+)+ and many a. So its parser reads
them, and regular_languages matches them, with the meaning that `re` gives them. Published checkpoints need anchors and
looks ahead, such as (?!mtp\\.), and word boundaries; a look ahead is an intersection with what may follow, or with
all else. References, looks behind, atomic groups and possessive repetitions are refused: they depend on more of the
text before, or on the way that `re` finds first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from functools import cache
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, Final, NamedTuple

from pagewick.weights.regular_languages import Language, Languages, TooComplexError

_MAX_LENGTH: Final = 10_000
_TOO_COMPLEX: Final = "is too complex a regular expression"
_FLAGS: Final = re.UNICODE | re.IGNORECASE | re.DOTALL | re.VERBOSE

_CHARACTER: Final = (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN)
_SINGLE: Final = (*_CHARACTER, op.AT)

Matches = Callable[[str], bool]


class PatternError(Exception):
    """The words that follow the expression in an error."""


class Place(Enum):
    """Which part of a name an expression matches."""

    START = auto()  # re.match
    ANYWHERE = auto()  # re.search
    END = auto()  # re.fullmatch of the name, or of what stands behind one of its dots


class _Left(Enum):
    """The character before a place in a name."""

    NOTHING = auto()
    WORD = auto()
    OTHER = auto()


# From what stands before a place to the texts that may follow.
_Behind = Callable[[_Left], Language]


def matcher_of(pattern: str, place: Place) -> Matches:
    """Return the function that says whether an expression matches a name.

    Raises PatternError for what is no regular expression, not supported or too complex; the function does for the last,
    too.
    """
    if len(pattern) > _MAX_LENGTH:
        raise PatternError(_TOO_COMPLEX)
    languages = Languages()
    try:
        tree = parser.parse(pattern)
        flags = _flags(tree.state.flags)
        if _has_one_way(list(tree), place):
            return _plain_matcher(pattern, place)
        names = _Reader(languages).names(list(tree), flags, place)
    except re.error as error:
        raise PatternError(f"is no regular expression ({error})") from error
    except (TooComplexError, RecursionError, OverflowError) as error:
        raise PatternError(_TOO_COMPLEX) from error

    def matches(name: str) -> bool:
        try:
            return languages.has(names, name)
        except (TooComplexError, RecursionError) as error:
            raise PatternError(_TOO_COMPLEX) from error

    return matches


def _has_one_way(items: Sequence[Any], place: Place) -> bool:
    """Return whether all that `re` may have to try is where one repetition of a character ends, or a match begins.

    It is faster then. Most expressions are such, and there may be many, as in GPTQModel's files that name each module.
    """
    if place is not Place.END and items[-1:] and _repeats_character(items[-1]) and items[-1][1][0] == 0:
        # A match may end before it.
        items = items[:-1]
    num_repeated = sum(map(_repeats_character, items)) + (place is not Place.START)
    return num_repeated <= 1 and all(item[0] in _SINGLE or _repeats_character(item) for item in items)


def _repeats_character(item: tuple[Any, Any]) -> bool:
    kind, value = item
    return kind in (op.MAX_REPEAT, op.MIN_REPEAT) and len(value[2]) == 1 and value[2][0][0] in _CHARACTER


def _plain_matcher(pattern: str, place: Place) -> Matches:
    if place is Place.END:
        whole = re.compile(rf"(?:.*\.)?(?:{pattern})")
        return lambda name: whole.fullmatch(name) is not None
    find = re.compile(pattern).match if place is Place.START else re.compile(pattern).search
    return lambda name: find(name) is not None


class _Characters(NamedTuple):
    """A class of characters: codes, ranges of codes and categories, as `re` parses them."""

    items: tuple[Any, ...]
    is_negated: bool = False
    ignores_case: bool = False

    def __contains__(self, character: object) -> bool:
        assert isinstance(character, str)
        variants = {character, character.lower(), character.upper()} if self.ignores_case else {character}
        is_listed = any(_is_in(item, variant) for item in self.items for variant in variants if len(variant) == 1)
        return is_listed is not self.is_negated


_ANY: Final = _Characters((), is_negated=True)
_NO_LINE_FEED: Final = _Characters(((op.LITERAL, ord("\n")),), is_negated=True)
_LINE_FEED: Final = _Characters(((op.LITERAL, ord("\n")),))
_DOT: Final = _Characters(((op.LITERAL, ord(".")),))
_WORD: Final = _Characters(((op.CATEGORY, op.CATEGORY_WORD),))
_NO_WORD: Final = _Characters(((op.CATEGORY, op.CATEGORY_WORD),), is_negated=True)

_CATEGORIES: Final[dict[Any, Callable[[str], bool]]] = {
    op.CATEGORY_DIGIT: str.isdecimal,
    op.CATEGORY_NOT_DIGIT: lambda character: not character.isdecimal(),
    op.CATEGORY_SPACE: str.isspace,
    op.CATEGORY_NOT_SPACE: lambda character: not character.isspace(),
    op.CATEGORY_WORD: lambda character: character.isalnum() or character == "_",
    op.CATEGORY_NOT_WORD: lambda character: not (character.isalnum() or character == "_"),
}


def _is_in(item: tuple[Any, Any], character: str) -> bool:
    kind, value = item
    if kind is op.LITERAL:
        return bool(ord(character) == value)
    if kind is op.RANGE:
        return bool(value[0] <= ord(character) <= value[1])
    return _CATEGORIES[value](character)


class _Reader:
    """Turns what Python's parser made of an expression into the set of the names that it matches."""

    def __init__(self, languages: Languages) -> None:
        self._all = languages
        self._any = languages.character(_ANY)

    def names(self, items: Sequence[Any], flags: int, place: Place) -> Language:
        rest = self._all.empty if place is Place.END else self._all.everything
        whole = cache(lambda left: self._sequence(items, flags, left, lambda left: rest))
        if place is Place.START:
            return whole(_Left.NOTHING)
        before = self._all.everything if place is Place.ANYWHERE else self._owner()
        return self._after(before, _Left.NOTHING, whole)

    def _owner(self) -> Language:
        """Return the texts that may stand before the end of a name: none, or some that end with a dot."""
        languages = self._all
        line = languages.times(languages.character(_NO_LINE_FEED), 0, None)
        return languages.either((languages.empty, languages.then(line, languages.character(_DOT))))

    def _sequence(self, items: Sequence[Any], flags: int, left: _Left, behind: _Behind) -> Language:
        """Return the texts that match items one after another, and go on as `behind` says."""
        num_plain = next((index for index, item in enumerate(items) if _looks_around(item)), len(items))
        if num_plain == len(items):
            return self._after(self._plain(items, flags), left, behind)
        item, others = items[num_plain], items[num_plain + 1 :]
        rest: _Behind = cache(lambda left: self._sequence(others, flags, left, behind)) if others else behind

        def from_item(left: _Left) -> Language:
            return self._looking(item, flags, left, rest)

        return self._after(self._plain(items[:num_plain], flags), left, from_item) if num_plain else from_item(left)

    def _after(self, before: Language, left: _Left, behind: _Behind) -> Language:
        """Return the texts of `before` with what may follow, which depends on their last characters."""
        languages = self._all
        if before is languages.empty:
            return behind(left)
        follows = {_WORD: behind(_Left.WORD), _NO_WORD: behind(_Left.OTHER)}
        same = {*follows.values(), *((behind(left),) if before.has_empty else ())}
        if len(same) == 1:
            return languages.then(before, same.pop())
        found = [behind(left)] if before.has_empty else []
        for last, follow in follows.items():
            ended = languages.then(languages.everything, languages.character(last))
            found.append(languages.then(languages.both((before, ended)), follow))
        return languages.either(found)

    def _looking(self, item: tuple[Any, Any], flags: int, left: _Left, behind: _Behind) -> Language:
        """Return the texts that match an item which depends on the text around it, and go on as `behind` says."""
        languages, (kind, value) = self._all, item
        if kind is op.AT:
            return self._at(value, left, behind)
        if kind is op.SUBPATTERN:
            _, added, removed, inner = value
            return self._sequence(list(inner), _flags(flags, added, removed), left, behind)
        if kind is op.BRANCH:
            return languages.either(self._sequence(list(inner), flags, left, behind) for inner in value[1])
        if kind in (op.ASSERT, op.ASSERT_NOT) and value[0] == 1:
            ahead = self._sequence(list(value[1]), flags, left, lambda left: languages.everything)
            return languages.both((ahead if kind is op.ASSERT else languages.others(ahead), behind(left)))
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT) and value[1] == 1:
            once = self._sequence(list(value[2]), flags, left, behind)
            return once if value[0] else languages.either((once, behind(left)))
        raise PatternError("looks behind, or repeats an anchor or a look ahead, which is not supported")

    def _at(self, place: Any, left: _Left, behind: _Behind) -> Language:
        languages = self._all
        if place in (op.AT_BEGINNING, op.AT_BEGINNING_STRING):
            return behind(left) if left is _Left.NOTHING else languages.nothing
        if place is op.AT_END_STRING:
            return languages.both((languages.empty, behind(left)))
        if place is op.AT_END:
            return languages.both((languages.times(languages.character(_LINE_FEED), 0, 1), behind(left)))
        is_at_word = languages.then(languages.character(_WORD), languages.everything)
        is_boundary = place is op.AT_BOUNDARY
        if (left is _Left.WORD) is is_boundary:
            is_at_word = languages.others(is_at_word)
        return languages.both((is_at_word, behind(left)))

    def _plain(self, items: Iterable[Any], flags: int) -> Language:
        """Return the texts that match items of which none depends on the text around it."""
        found = self._all.empty
        for item in reversed(list(items)):
            found = self._all.then(self._item(item, flags), found)
        return found

    def _item(self, item: tuple[Any, Any], flags: int) -> Language:
        languages, (kind, value) = self._all, item
        ignores_case = bool(flags & re.IGNORECASE)
        if kind in (op.LITERAL, op.NOT_LITERAL):
            return languages.character(_Characters(((op.LITERAL, value),), kind is op.NOT_LITERAL, ignores_case))
        if kind is op.ANY:
            return self._any if flags & re.DOTALL else languages.character(_NO_LINE_FEED)
        if kind is op.IN:
            is_negated = value[0][0] is op.NEGATE
            return languages.character(_Characters(tuple(value[is_negated:]), is_negated, ignores_case))
        if kind is op.FAILURE:
            return languages.nothing
        if kind is op.BRANCH:
            return languages.either(self._plain(inner, flags) for inner in value[1])
        if kind is op.SUBPATTERN:
            _, added, removed, inner = value
            return self._plain(inner, _flags(flags, added, removed))
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            least, most, inner = value
            return languages.times(self._plain(inner, flags), least, None if most is op.MAXREPEAT else most)
        raise PatternError("has references, atomic groups or possessive repetitions, which are not supported")


def _flags(flags: int, added: int = 0, removed: int = 0) -> int:
    flags = (flags | added) & ~removed
    if flags & ~_FLAGS:
        raise PatternError("has flags other than i, s, u and x, which are not supported")
    return flags


def _looks_around(item: tuple[Any, Any]) -> bool:
    kind, value = item
    if kind in (op.SUBPATTERN, op.MAX_REPEAT, op.MIN_REPEAT):
        return any(map(_looks_around, value[-1]))
    if kind is op.BRANCH:
        return any(_looks_around(item) for inner in value[1] for item in inner)
    return kind in (op.AT, op.ASSERT, op.ASSERT_NOT)
