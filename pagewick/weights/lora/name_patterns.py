"""Regular expressions of an adapter for names of modules, matched in a time that is linear in the name.

An adapter is untrusted data, and Python's `re` may try exponentially many ways, as for (a+)+ and many a. llguidance
follows all ways at once, and stops at expressions that are too large.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from llguidance import LLMatcher, LLTokenizer

# Letters, and dots for any character: `re` has one way to match these.
_PLAIN: Final = re.compile(r"[\w.]+")
_MAX_LENGTH: Final = 1000
# An escape, a class of characters, or one character.
_SYMBOL: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_TOO_LARGE: Final = "is too complex a regular expression"

Matches = Callable[[str], bool]


class PatternError(Exception):
    """The words that follow the expression in an error."""


def matcher_of(pattern: str) -> Matches:
    """Return the function that says whether an expression matches a name, or its end behind a dot, as in PEFT.

    Raises PatternError for what is no regular expression, refers back or looks around, or is too complex; the function
    does for the last, too.
    """
    if _PLAIN.fullmatch(pattern):
        plain = re.compile(rf"(.*\.)?({pattern})")
        return lambda name: plain.fullmatch(name) is not None
    if len(pattern) > _MAX_LENGTH:
        raise PatternError(_TOO_LARGE)
    grammar = LLMatcher.grammar_from_regex("|".join(map(_whole, _alternatives(pattern))))
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    if matcher.is_error():
        raise PatternError("is no regular expression, or has references or looks around, which is not supported")

    def matches(name: str) -> bool:
        matcher.reset()
        num_bytes = len(encoded := list(name.encode()))
        is_match = matcher.try_consume_tokens(encoded) == num_bytes and matcher.is_accepting()
        if matcher.is_error():
            raise PatternError(_TOO_LARGE)
        return is_match

    return matches


def _alternatives(pattern: str) -> list[list[str]]:
    """Return the symbols of each alternative that is in no group."""
    found: list[list[str]] = [[]]
    depth = 0
    for symbol in _SYMBOL.findall(pattern):
        depth += (symbol == "(") - (symbol == ")")
        if symbol == "|" and not depth:
            found.append([])
        else:
            found[-1].append(symbol)
    return found


def _whole(alternative: list[str]) -> str:
    """Return the expression for whole names. llguidance knows no anchors, and always matches whole texts."""
    is_begun = alternative[:1] == ["^"]
    end = len(alternative) - (alternative[-1:] == ["$"])
    return ("" if is_begun else r"(.*\.)?") + f"({''.join(alternative[is_begun:end])})"
