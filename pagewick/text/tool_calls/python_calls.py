"""Calls in Python's notation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pagewick.text.tool_calls.grammar import GrammarWriter
from pagewick.text.tool_calls.offer import Tool, ToolOffer
from pagewick.text.tool_calls.reading import (
    END,
    MAX_DEPTH,
    NoCall,
    Reader,
    Reading,
    Write,
    escaped,
    no_write,
)  # fmt: skip
from pagewick.text.tool_calls.schema_types import types_of
from pagewick.text.tool_calls.written import WrittenCall

_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\\": "\\", "'": "'",
    '"': '"', "\n": "", "/": "/",
}  # fmt: skip
# A string in single quotes, as a regular expression.
_SINGLE_QUOTED = r"/'([^'\\\x00-\x1f]|\\[nrt\\'\"])*'/"
# Keywords that do not restrict a value of one type.
_PLAIN = {"type", "description", "title", "default", "examples"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_MAX_NAME = 160


def read_python_call(reader: Reader, offer: ToolOffer, *, may_print: bool = False) -> Reading[None]:
    """Read a call such as `f(a=1)`, or `f.call(a=1)`, as Llama 3 has it for built-in tools.

    may_print: it may be within `print()`.
    """
    name = yield from _name(reader)
    if name not in offer.by_name:
        name = name.removesuffix(".call")
    yield from reader.char("(", no_write)
    if may_print and name == "print" and name not in offer.by_name:
        yield from read_python_call(reader, offer)
        yield from reader.blanks()
        yield from reader.char(")", no_write)
        return
    reader.calls.begin(name)
    positions = iter(offer.by_name[name].properties)
    reader.calls.write("{")
    yield from entries(reader, ")", lambda: _argument(reader, positions), reader.calls.write)
    reader.calls.write("}")


def entries(reader: Reader, closing: str, entry: Callable[[], Reading[None]], write: Write) -> Reading[None]:
    """Read entries, commas between and perhaps after them, and the closing bracket."""
    separator = ""
    while (yield from reader.blanks()) != closing:
        if separator:
            yield from reader.char(",", no_write)
            if (yield from reader.blanks()) == closing:
                break
        write(separator)
        yield from entry()
        separator = ", "
    yield from reader.char(closing, no_write)


def _argument(reader: Reader, positions: Iterator[str]) -> Reading[None]:
    """Read `name=value`, or a value whose place names it."""
    write, first, word = reader.calls.write, (yield from reader.peek()), ""
    if first.isalpha() or first == "_":
        word = yield from _name(reader)
        if (yield from reader.blanks()) == "=":
            yield from reader.char("=", no_write)
            write(f'"{escaped(word)}": ')
            yield from value(reader, write)
            return
        if word not in _WORDS:
            raise NoCall
    if first == END or (name := next(positions, None)) is None:
        raise NoCall
    write(f'"{escaped(name)}": ')
    if word:
        write(_WORDS[word])
    else:
        yield from value(reader, write)


def _name(reader: Reader) -> Reading[str]:
    name = ""
    while (char := (yield from reader.peek())) != END and (char.isalnum() or char in "_.-") and len(name) < _MAX_NAME:
        name += yield from reader.take()
    return name


def value(reader: Reader, write: Write, depth: int = 0) -> Reading[None]:
    """Read a Python value; write it as JSON."""
    if depth > MAX_DEPTH:
        raise NoCall
    char = yield from reader.blanks()
    if char == "{":
        yield from reader.take()
        write("{")
        yield from entries(reader, "}", lambda: _pair(reader, write, depth), write)
        write("}")
    elif char in ("[", "("):
        yield from reader.take()
        write("[")
        yield from entries(reader, {"[": "]", "(": ")"}[char], lambda: value(reader, write, depth + 1), write)
        write("]")
    elif char in ("'", '"'):
        yield from string(reader, write)
    elif char == "-" or char.isdecimal():
        yield from reader.number(write)
    else:
        yield from reader.keyword(_WORDS, write)


def _pair(reader: Reader, write: Write, depth: int) -> Reading[None]:
    yield from string(reader, write)
    yield from reader.blanks()
    yield from reader.char(":", no_write)
    write(": ")
    yield from value(reader, write, depth + 1)


def string(reader: Reader, write: Write) -> Reading[None]:
    """Read a Python string in single or double quotes; write it as JSON.

    A quote that a letter or digit follows belongs to the string: LFM2.5's template shows texts such as 'it's'.
    """
    quote = yield from reader.take()
    if quote not in ("'", '"'):
        raise NoCall
    write('"')
    while True:
        char = yield from reader.take()
        if char == quote and not (yield from reader.peek()).isalnum():
            break
        if char != "\\":
            write(escaped(char))
            continue
        char = yield from _escape(reader)
        # A half of a character becomes an escape again, since only JSON can join the halves.
        write(f"\\u{ord(char):04x}" if "\ud800" <= char <= "\udfff" else escaped(char))
    write('"')


def _escape(reader: Reader) -> Reading[str]:
    kind = yield from reader.take()
    if kind not in _HEX_DIGITS:
        return _ESCAPES.get(kind, "\\" + kind)
    digits = ""
    for _ in range(_HEX_DIGITS[kind]):
        digits += yield from reader.take()
    try:
        return chr(int(digits, 16))
    except (ValueError, OverflowError):
        raise NoCall from None


def python_call(writer: GrammarWriter, tool: Tool, before: str = "", *, has_json_words: bool = False) -> str:
    """Return an expression for a call of one tool.

    before: text before it, which must not be apart from the name. has_json_words: the model may write `true`, too.
    """

    def argument(key: str, schema: Any) -> str:
        types, found = types_of(schema, tool.parameters), writer.value(tool, schema)
        if types == {"boolean"} and schema.keys() <= _PLAIN:
            found = '("True" | "False" | "true" | "false")' if has_json_words else '("True" | "False")'
        elif types == {"string"} and schema.keys() <= _PLAIN:
            found = rf"({found} | {_SINGLE_QUOTED})"
        return f"{writer.word(f'{key}=')} {found}"

    pairs = [(argument(key, schema), is_required) for key, schema, is_required in writer.named_arguments(tool)]
    return f'{writer.word(f"{before}{tool.name}(")} {writer.sequence(pairs, ", ")} ")"'


def written_python(call: WrittenCall) -> str:
    """Write a call as Python does."""
    return f"{call.name}({', '.join(f'{key}={found!r}' for key, found in call.pairs.items())})"
