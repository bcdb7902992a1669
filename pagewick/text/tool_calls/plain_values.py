"""Values without quotes around them: texts, JSON, and Python's notation for lists and objects."""

from __future__ import annotations

import json
from collections.abc import Iterator

from pagewick.text.tool_calls.alternatives import type_of
from pagewick.text.tool_calls.python_calls import value
from pagewick.text.tool_calls.reading import END, NoCall, Reader
from pagewick.text.tool_calls.schema_types import refuse_constant

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def json_of(text: str, types: frozenset[str]) -> str:
    """Return the value of a text without quotes as JSON: a string, unless it is JSON of another allowed type.

    Lists and objects may be written as Python does, which the templates of Seed-OSS and MiniCPM5 show to their models.
    """
    for written in _ways(text.strip()):
        try:
            kind = type_of(json.loads(written, parse_constant=refuse_constant))
        except (ValueError, RecursionError):
            continue
        is_allowed = kind in types or (kind == "integer" and "number" in types) or "string" not in types
        if is_allowed and kind != "string":
            return written
        break
    return json.dumps(text, ensure_ascii=False)


def _ways(text: str) -> Iterator[str]:
    """Yield what may be the text as JSON."""
    yield _PYTHON_WORDS.get(text, text)
    if text.startswith(("{", "[")) and (found := _from_python(text)) is not None:
        yield found


def _from_python(text: str) -> str | None:
    """Return a list or dictionary of Python as JSON; None for another text. Its depth is limited as that of calls."""
    pieces: list[str] = []
    reading = value(Reader(_NoCalls(), str, ""), pieces.append)
    rest = iter(text)
    try:
        next(reading)
        for char in rest:
            reading.send(char)
        reading.send(END)
    except NoCall:
        return None
    except StopIteration:
        return "".join(pieces) if next(rest, None) is None else None
    return None


class _NoCalls:
    """Takes the calls of a reader of values, which has none."""

    def begin(self, name: str) -> None:
        raise NoCall

    def write(self, arguments: str) -> None:
        raise NoCall

    def commit(self) -> None:
        raise NoCall
