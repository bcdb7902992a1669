"""MiniCPM5: a function with its parameters in tags with names as attributes; some texts are in CDATA sections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pagewick.text.tool_calls.grammar import GrammarWriter
from pagewick.text.tool_calls.offer import Tool, ToolOffer
from pagewick.text.tool_calls.plain_values import json_of
from pagewick.text.tool_calls.reading import Reader, Reading, escaped
from pagewick.text.tool_calls.schema_types import types_of
from pagewick.text.tool_calls.splitter import CallFormat
from pagewick.text.tool_calls.written import WrittenCall, as_text

# The tags without their attributes are tokens of their own: llama.cpp and vLLM keep these from being skipped.
_CALL, _CALL_END, _PARAM, _PARAM_END = "<function", "</function>", "<param", "</param>"
_NAME: Final = 'name="'
_NAME_END: Final = '">'
# Around texts with one of these characters.
_CDATA, _CDATA_END = "<![CDATA[", "]]>"
_QUOTED: Final = frozenset("<&\n")
_MAX_NAME: Final = 160
_MAX_KEY: Final = 1000


def _read(reader: Reader, offer: ToolOffer) -> Reading[None]:
    write = reader.calls.write
    yield from reader.blanks()
    yield from reader.word(_NAME)
    name = yield from reader.until((_NAME_END,), limit=_MAX_NAME)
    reader.calls.begin(name)
    separator = "{"
    while True:
        yield from reader.blanks()
        if (yield from reader.one_of((_PARAM, _CALL_END))) == _CALL_END:
            write("}" if separator != "{" else "{}")
            return
        yield from reader.blanks()
        yield from reader.word(_NAME)
        key = yield from reader.until((_NAME_END,), limit=_MAX_KEY)
        write(f'{separator}"{escaped(key)}": ')
        yield from _read_value(reader, offer.by_name[name], key)
        separator = ", "


def _read_value(reader: Reader, tool: Tool, key: str) -> Reading[None]:
    types = types_of(tool.properties.get(key), tool.parameters)
    pieces: list[str] = []
    is_string = types == {"string"}

    def take(text: str) -> None:
        pieces.append(text)
        if is_string:
            reader.calls.write(escaped(text))

    if is_string:
        reader.calls.write('"')
    yield from reader.until((_CDATA, _PARAM_END), take)
    if reader.ended_by == _CDATA:
        end = _PARAM_END if any(pieces) else _CDATA_END + _PARAM_END
        if any(pieces):
            take(_CDATA)
        yield from reader.until((end,), take)
    reader.calls.write('"' if is_string else json_of("".join(pieces), types))


def _written(calls: Sequence[WrittenCall]) -> str:
    found = []
    for call in calls:
        pairs = "".join(f'{_PARAM} {_NAME}{key}">{_quoted(value)}{_PARAM_END}' for key, value in call.pairs.items())
        found.append(f'{_CALL} {_NAME}{call.name}">{pairs}{_CALL_END}')
    return "\n".join(found)


def _quoted(value: Any) -> str:
    text = as_text(value)
    return f"{_CDATA}{text}{_CDATA_END}" if isinstance(value, str) and _QUOTED & {*text} else text


def _grammar(writer: GrammarWriter) -> str:
    call = writer.call(lambda tool: _call_grammar(writer, tool))
    return writer.grammar(writer.calls(call, writer.words("\n", _CALL)), (_CALL,))


def _call_grammar(writer: GrammarWriter, tool: Tool) -> str:
    def argument(key: str, schema: Any) -> str:
        opening = writer.words(_PARAM, f" {_NAME}{key}{_NAME_END}")
        return f"{opening} {writer.tagged(tool, schema, '', _PARAM_END, quotes=(_CDATA, _CDATA_END))}"

    pairs = [(argument(key, schema), is_required) for key, schema, is_required in writer.named_arguments(tool)]
    opening = writer.word(f" {_NAME}{tool.name}{_NAME_END}")
    return f"{opening} {writer.sequence(pairs, '')} {writer.word(_CALL_END)}"


MINICPM_5 = CallFormat(
    "minicpm5",
    read=_read,
    written=_written,
    grammar=_grammar,
    words=(_CALL, _CALL_END, _PARAM, _PARAM_END),
    openers=(_CALL,),
)
