"""Reads the arguments of a call, which max_tokens may have cut off."""

from __future__ import annotations

import json
from typing import Any

_CLOSERS = {"{": "}", "[": "]"}


def read_input(text: str) -> dict[str, Any]:
    """Return the object in a text; of one that is cut off, all values that are complete."""
    try:
        value = json.loads(text)
    except ValueError:
        value = _read_beginning(text)
    except RecursionError:  # of a text that nests a thousand times
        value = {}
    return value if isinstance(value, dict) else {}


def _read_beginning(text: str) -> Any:
    """Cut the text after its last complete value, and close everything that is open there."""
    open_brackets: list[str] = []
    is_string = is_escaped = False
    cuts: list[tuple[int, str]] = []  # where the text may be cut, with the brackets that close it there
    for place, character in enumerate(text):
        if is_string:
            is_string = is_escaped or character != '"'
            is_escaped = character == "\\" and not is_escaped
            continue
        if character == '"':
            is_string = True
        elif character in _CLOSERS:
            open_brackets.append(_CLOSERS[character])
            cuts.append((place + 1, "".join(reversed(open_brackets))))
        elif character in "}]" and open_brackets:
            open_brackets.pop()
            cuts.append((place + 1, "".join(reversed(open_brackets))))
        elif character == ",":
            cuts.append((place, "".join(reversed(open_brackets))))
    for place, closing in reversed(cuts):
        try:
            return json.loads(text[:place] + closing)
        except ValueError:
            continue
    return {}
