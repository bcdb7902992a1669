"""How much one request may ask for, checked before anything is done with it."""

from __future__ import annotations

import re

from pagewick.errors import InvalidRequestError

MAX_JSON_DEPTH = 64
MAX_JSON_PARTS = 250_000
MAX_MESSAGES = 2048
MAX_SEQUENCES = 1024  # prompts times choices of one request
MAX_STOP_CHARS = 1024

# A string (its brackets do not count) or one bracket.
_JSON_PART = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)


def check_nesting(body: bytes) -> None:
    """Raises InvalidRequestError for JSON so deep or of so many parts that reading it would be the attack."""
    if body.count(b"[") + body.count(b"{") <= MAX_JSON_DEPTH:
        return
    depth = 0
    for num_parts, match in enumerate(_JSON_PART.finditer(body)):
        if num_parts >= MAX_JSON_PARTS:
            raise InvalidRequestError(f"the JSON has more than {MAX_JSON_PARTS} strings and brackets")
        part = match[0]
        if part in b"[{":
            depth += 1
            if depth > MAX_JSON_DEPTH:
                raise InvalidRequestError(f"the JSON is nested deeper than {MAX_JSON_DEPTH} levels")
        elif part in b"]}":
            depth -= 1


def check_count(param: str, count: int, limit: int) -> None:
    """Raises InvalidRequestError unless 1 <= count <= limit."""
    if not 1 <= count <= limit:
        raise InvalidRequestError(f"{param} must have 1 to {limit} entries; got {count}", param=param)


def check_stop(stop: list[str]) -> None:
    """Raises InvalidRequestError for a stop string that is too long; SamplingParams checks the rest."""
    if any(len(text) > MAX_STOP_CHARS for text in stop):
        raise InvalidRequestError(f"a stop string must have at most {MAX_STOP_CHARS} characters", param="stop")
