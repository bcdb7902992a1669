"""GrammarLimits: limits on a request's schema or grammar, checked before it is compiled."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec

from pagewick.config import EngineConfig
from pagewick.errors import InvalidRequestError

_STEPS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """max_size: in characters. max_depth: levels of nesting. timeout_s: time for compiling, in seconds."""

    max_size: int = 256 * 1024
    max_depth: int = 64
    timeout_s: float = 0.5

    @classmethod
    def of(cls, config: EngineConfig) -> GrammarLimits:
        return cls(config.max_grammar_size, config.max_grammar_depth, config.grammar_timeout)

    def check_brackets(self, text: str) -> None:
        """Raise InvalidRequestError for a grammar that is too long or nested too deeply."""
        if len(text) > self.max_size:
            raise cannot(f"it has {len(text)} characters, more than the limit of {self.max_size} (--max-grammar-size)")
        depths = accumulate(_STEPS.get(char, 0) for char in text)
        # Brackets in literals count, too. They mostly come in pairs, and a grammar has few levels.
        if max(depths, default=0) > self.max_depth:
            raise cannot(f"it is nested deeper than {self.max_depth} levels (--max-grammar-depth)")

    def check_depth(self, value: Any, depth: int = 0) -> None:
        """Raise InvalidRequestError for JSON that is nested too deeply."""
        if not isinstance(value, dict | list):
            return
        if depth >= self.max_depth:
            raise cannot(f"it is nested deeper than {self.max_depth} levels (--max-grammar-depth)")
        for inner in value.values() if isinstance(value, dict) else value:
            self.check_depth(inner, depth + 1)


def cannot(reason: str) -> InvalidRequestError:
    """Return the error for a form that cannot be honoured."""
    return InvalidRequestError(f"structured_outputs cannot be honoured: {reason}", param="structured_outputs")


def read_json(text: str, name: str, limits: GrammarLimits) -> Any:
    """Raises InvalidRequestError for a text that is too long or not JSON."""
    if len(text) > limits.max_size:
        raise cannot(f"{name} has {len(text)} characters, more than the limit of {limits.max_size}")
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise cannot(f"{name} is nested deeper than {limits.max_depth} levels (--max-grammar-depth)") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise cannot(f"{name} is not valid JSON: {error}") from None
