"""Reader: reads a model's calls character by character, in generators that wait for the next character.

A generator that reads something is delegated to with `yield from`, and raises NoCall at the first character that does
not belong there. The functions that format modules consist of, such as `read_envelope`, are generators too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, TypeVar

from pagewick.text.stop_strings import partial_match_len
from pagewick.text.tool_calls.schema_types import refuse_constant

# The generator is sent this at the end of the output.
END = ""
BLANKS = " \t\r\n"
# Texts that `until` takes for a part of the marker behind them.
_BEFORE_MARKERS = ("\n", "]]>")
# Depth of nested values; JSON in requests may be a little deeper.
MAX_DEPTH = 48
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_SURROGATES = re.compile("[\ud800-\udfff]")
_NUMBER_CHARS = "+-.eE0123456789"
# Fields that a call may have besides its name and arguments.
_BESIDE_ARGUMENTS = ("id", "index", "tool_call_id", "type")
_ESCAPED = '"\\/bfnrt'

_Result = TypeVar("_Result")
Reading = Generator[None, str, _Result]
Write = Callable[[str], Any]


class NoCall(Exception):
    """The output is not a call from here on."""


class Calls(Protocol):
    """Takes the calls as they are read."""

    def begin(self, name: str) -> None:
        """Begin a call; raises NoCall if there is no such tool, or no further call is allowed."""
        ...

    def write(self, arguments: str) -> None:
        """Append to the arguments of the call that has begun."""
        ...

    def commit(self) -> None:
        """Declare all calls so far complete, whatever follows."""
        ...


class Reader:
    """The characters of an output after an opener.

    calls: takes the calls. spell: maps a format's marker to the characters that are fed for it. opener: as the format
    spells it; empty at the beginning of a response. ended_by: the marker that ended the last text. ahead: a character
    that was looked at.
    """

    def __init__(self, calls: Calls, spell: Callable[[str], str], opener: str) -> None:
        self.calls = calls
        self.opener = opener
        self.spell = spell
        self.ended_by = ""
        self.ahead: str | None = None

    def peek(self) -> Reading[str]:
        """Return the next character without consuming it; END at the end of the output."""
        if self.ahead is None:
            self.ahead = yield
        return self.ahead

    def take(self) -> Reading[str]:
        char = yield from self.peek()
        if char == END:
            raise NoCall
        self.ahead = None
        return char

    def blanks(self, write: Write | None = None) -> Reading[str]:
        """Skip white space. Return the next character without consuming it."""
        while True:
            char = yield from self.peek()
            if char == END or char not in BLANKS:
                return char
            self.ahead = None
            if write is not None:
                write(char)

    def word(self, marker: str, *, may_end: bool = False) -> Reading[None]:
        """Read a marker. may_end: the output may end before or within it."""
        for expected in self.spell(marker):
            char = yield from self.peek()
            if char == END and may_end:
                return
            if char != expected:
                raise NoCall
            self.ahead = None

    def one_of(self, markers: Sequence[str]) -> Reading[str]:
        """Read one of several markers, none of which begins another; return it."""
        spelled = {self.spell(marker): marker for marker in markers}
        read = ""
        while read not in spelled:
            char = yield from self.peek()
            if char == END or not any(one.startswith(read + char) for one in spelled):
                raise NoCall
            self.ahead = None
            read += char
        return spelled[read]

    def until(self, markers: Sequence[str], write: Write | None = None, *, limit: int | None = None) -> Reading[str]:
        """Read a text up to one of the markers, and the marker. Return the text, or write it piece by piece.

        If two markers end at the same place, the one that comes first in the list counts. limit: of the text's length.
        """
        ends = {self._spelled_line(marker): marker for marker in markers}
        text = ""
        while True:
            text += yield from self.take()
            if (end := next((one for one in ends if text.endswith(one)), None)) is not None:
                text, self.ended_by = text[: -len(end)], ends[end]
                break
            if limit is not None and len(text) > limit + max(map(len, ends)):
                raise NoCall
            if write is not None and (num_safe := len(text) - partial_match_len(text, [*ends])):
                write(text[:num_safe])
                text = text[num_safe:]
        if write is not None and text:
            write(text)
        return text

    def _spelled_line(self, marker: str) -> str:
        """Spell a marker that one of _BEFORE_MARKERS may precede."""
        before = next((text for text in _BEFORE_MARKERS if marker != text and marker.startswith(text)), "")
        return before + self.spell(marker.removeprefix(before))

    def opens(self, opening: str, closing: str, write: Write) -> Reading[bool]:
        """Read the opening bracket; return whether there is an entry. Otherwise also read the closing one."""
        yield from self.blanks(write)
        yield from self.char(opening, write)
        if (yield from self.blanks(write)) != closing:
            return True
        yield from self.char(closing, write)
        return False

    def goes_on(self, closing: str, write: Write) -> Reading[bool]:
        """Read a comma, or the closing bracket; return whether another entry follows."""
        if (yield from self.blanks(write)) == closing:
            yield from self.char(closing, write)
            return False
        yield from self.char(",", write)
        yield from self.blanks(write)
        return True

    def char(self, expected: str, write: Write) -> Reading[None]:
        char = yield from self.take()
        if char != expected:
            raise NoCall
        write(char)

    def json(self, write: Write, depth: int = 0) -> Reading[None]:
        """Read and write a JSON value as it stands; line breaks and tabs in strings become escapes."""
        if depth > MAX_DEPTH:
            raise NoCall
        char = yield from self.blanks(write)
        if char == "{":
            more = yield from self.opens("{", "}", write)
            while more:
                yield from self.string(write)
                yield from self.blanks(write)
                yield from self.char(":", write)
                yield from self.json(write, depth + 1)
                more = yield from self.goes_on("}", write)
        elif char == "[":
            more = yield from self.opens("[", "]", write)
            while more:
                yield from self.json(write, depth + 1)
                more = yield from self.goes_on("]", write)
        elif char == '"':
            yield from self.string(write)
        elif char == "-" or char.isdecimal():
            yield from self.number(write)
        else:
            yield from self.keyword({"true": "true", "false": "false", "null": "null"}, write)

    def string(self, write: Write) -> Reading[None]:
        """Read and write a JSON string with its quotes."""
        yield from self.char('"', write)
        while True:
            char = yield from self.take()
            if char == "\\":
                write(char)
                char = yield from self.take()
                if char == "u":
                    write(char)
                    for _ in range(3):
                        write((yield from self._hex_digit()))
                    char = yield from self._hex_digit()
                elif char not in _ESCAPED:
                    raise NoCall
            elif char == '"':
                write(char)
                return
            write(escaped(char) if char < " " else char)

    def text(self) -> Reading[str]:
        """Read a JSON string; return its value."""
        read: list[str] = []
        yield from self.string(read.append)
        text: str = json.loads("".join(read))
        return text

    def number(self, write: Write) -> Reading[None]:
        read = ""
        while (char := (yield from self.peek())) != END and char in _NUMBER_CHARS:
            self.ahead = None
            read += char
        if not _NUMBER.fullmatch(read):
            raise NoCall
        write(read)

    def keyword(self, words: dict[str, str], write: Write) -> Reading[None]:
        """Read one of the words; write its counterpart in JSON."""
        read = ""
        while (char := (yield from self.peek())) != END and char.isalpha() and len(read) < 8:
            self.ahead = None
            read += char
        if read not in words:
            raise NoCall
        write(words[read])

    def _hex_digit(self) -> Reading[str]:
        char = yield from self.take()
        if char not in "0123456789abcdefABCDEF":
            raise NoCall
        return char


def escaped(text: str) -> str:
    """Return a text as JSON has it between quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def no_write(_: str) -> None:
    """Drop what is read."""


def read_envelope(
    reader: Reader, *, name: str = "name", arguments: Sequence[str] = ("arguments", "parameters"), is_sure: bool = True
) -> Reading[None]:
    """Read one call that is a JSON object with a name and arguments, in any order; other fields are skipped.

    is_sure: without a field of arguments, the object is a call without arguments, unless it has an unknown field, which
    may be the arguments under a wrong name. If not is_sure, such an object is no call.
    """
    calls, called, early = reader.calls, None, None
    more = yield from reader.opens("{", "}", no_write)
    has_arguments = False
    while more:
        key = yield from reader.text()
        yield from reader.blanks()
        yield from reader.char(":", no_write)
        first = yield from reader.blanks()
        if key == name and called is None:
            called = yield from reader.text()
            calls.begin(called)
            if early is not None:
                calls.write(early)
        elif key in arguments and not has_arguments:
            has_arguments = True
            if called is not None and first == "{":
                yield from reader.json(calls.write)
            else:
                early = yield from _other_arguments(reader, first)
                if called is not None:
                    calls.write(early)
        else:
            is_sure = is_sure and key in _BESIDE_ARGUMENTS
            yield from reader.json(no_write)
        more = yield from reader.goes_on("}", no_write)
    if called is None or not (has_arguments or is_sure):
        raise NoCall
    if not has_arguments:
        calls.write("{}")


def _other_arguments(reader: Reader, first: str) -> Reading[str]:
    """Read arguments that precede the name, or that are null or a string of JSON."""
    if first == '"':
        text = (yield from reader.text()).strip() or "{}"
        return as_object(text)
    read: list[str] = []
    if first == "{":
        yield from reader.json(read.append)
        return "".join(read)
    yield from reader.keyword({"null": "{}"}, read.append)
    return "".join(read)


def as_object(text: str) -> str:
    """Return a text that is a JSON object as JSON. Raises NoCall for another text."""
    try:
        value = json.loads(text, strict=False, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        raise NoCall from None
    if not isinstance(value, dict):
        raise NoCall
    found = json.dumps(value, ensure_ascii=False)
    # Half of a surrogate pair is no character, so it must stay an escape.
    return json.dumps(value) if _SURROGATES.search(found) else found


def read_envelopes(reader: Reader, *, is_sure: bool = True, **fields: Any) -> Reading[None]:
    """Read a JSON list of calls, or a single one."""
    if (yield from reader.blanks()) != "[":
        yield from read_envelope(reader, is_sure=is_sure, **fields)
        reader.calls.commit()
        return
    more = yield from reader.opens("[", "]", no_write)
    if not more:
        raise NoCall
    while more:
        yield from read_envelope(reader, is_sure=is_sure, **fields)
        reader.calls.commit()
        more = yield from reader.goes_on("]", no_write)


def read_arguments(reader: Reader) -> Reading[None]:
    """Read the arguments of the call that has begun: a JSON object."""
    if (yield from reader.blanks()) != "{":
        raise NoCall
    yield from reader.json(reader.calls.write)
