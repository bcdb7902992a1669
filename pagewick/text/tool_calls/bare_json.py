"""JSON without a marker, at the beginning of a response.

Llama 3, where a token may precede it; xLAM, where it is a list; and any other model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

from pagewick.text.tool_calls.grammar import GrammarWriter
from pagewick.text.tool_calls.offer import Tool, ToolOffer
from pagewick.text.tool_calls.python_calls import read_python_call
from pagewick.text.tool_calls.reading import END, Reader, Reading, no_write, read_envelope, read_envelopes
from pagewick.text.tool_calls.splitter import CallFormat
from pagewick.text.tool_calls.written import WrittenCall, envelope

_PYTHON_TAG = "<|python_tag|>"
# White space of a form that is JSON, too: the tokens of both are then equal, and calls begin with one text.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Llama 3.1 writes this field before the name.
_KIND = '"type": "function", '


def _read(reader: Reader, offer: ToolOffer) -> Reading[None]:
    """Read objects with semicolons between them, a list of objects, or calls of built-in tools as Python."""
    while True:
        first = yield from reader.blanks()
        if first == "`":
            yield from _read_fence(reader)
        elif first == "[":
            yield from read_envelopes(reader, is_sure=False)
        elif first == "{":
            yield from read_envelope(reader, is_sure=False)
        else:
            yield from read_python_call(reader, offer)
        reader.calls.commit()
        if (yield from reader.blanks()) == END:
            return
        yield from reader.char(";", no_write)


def _read_fence(reader: Reader) -> Reading[None]:
    yield from reader.word("```json")
    yield from read_envelopes(reader, is_sure=False)
    yield from reader.blanks()
    yield from reader.word("```", may_end=True)


def _written(calls: Sequence[WrittenCall]) -> str:
    return "; ".join(envelope(call, arguments_key="parameters") for call in calls)


def _written_list(calls: Sequence[WrittenCall]) -> str:
    return f"[{', '.join(map(envelope, calls))}]"


def _exact_starts(offer: ToolOffer) -> list[str]:
    return [f"{{{_named(tool)}" for tool in offer.tools]


def _list_starts(offer: ToolOffer) -> list[str]:
    return [f'[{{"name": {json.dumps(tool.name)}, "arguments": ' for tool in offer.tools]


def _named(tool: Tool) -> str:
    return f'"name": {json.dumps(tool.name)}, "parameters": '


def _call(writer: GrammarWriter, tool: Tool) -> str:
    if not writer.offer.has_form:
        openings = [writer.word(f"{{{before}{_named(tool)}") for before in ("", _KIND)]
        return f'({" | ".join(openings)}) {writer.arguments(tool)} "}}"'
    return _object(writer, "parameters", tool)


def _object(writer: GrammarWriter, key: str, tool: Tool, before: str = "") -> str:
    words = [*[before] * bool(before), "{", '"name"', ": ", json.dumps(tool.name), ", ", f'"{key}"', ": "]
    # Texts as long as possible keep calls apart from text, but would hide the tokens of JSON from the lexer.
    opening = writer.words(*words) if writer.offer.form == "json" else writer.word("".join(words))
    return f'{opening} {writer.arguments(tool)} "}}"'


def _list_grammar(writer: GrammarWriter) -> str:
    first, other = (writer.call(partial(_object, writer, "arguments", before=before)) for before in ("[", ""))
    more = f"({writer.word(', ')} {other})*" if writer.offer.is_parallel else ""
    return writer.grammar(f'{first} {more} "]"', (), start=_start(writer.names))


def _grammar(writer: GrammarWriter, *openers: str) -> str:
    call = writer.call(partial(_call, writer))
    return writer.grammar(writer.calls(call, writer.word("; ")), openers, start=_start(writer.names))


def _start(names: str) -> str:
    """Return a regular expression for texts that are allowed only as calls, since they would be read as such."""
    begun = r"\s*(```json\s*)?(\[\s*)?\{"
    return rf'{begun}(\s*"name"|{_fields(3)}"name"\s*:\s*"({names})")(?s:.*)'


def _fields(depth: int) -> str:
    """Return a regular expression for JSON before a name: strings, and brackets that are closed again."""
    nested = rf"|[{{\[]{_fields(depth - 1)}[}}\]]" if depth else ""
    return rf'([^"{{}}\[\]]|"([^"\\]|\\.)*"{nested})*'


LLAMA_3 = CallFormat(
    "llama3_json",
    read=_read,
    written=_written,
    grammar=lambda writer: _grammar(writer, _PYTHON_TAG),
    words=(_PYTHON_TAG,),
    openers=(_PYTHON_TAG,),
    starts=lambda _: ("{",),
    exact_starts=_exact_starts,
    json_spacing=_SPACING,
)
XLAM = CallFormat(
    "xlam",
    read=_read,
    written=_written_list,
    grammar=_list_grammar,
    starts=lambda _: ("{", "[", "```json"),
    exact_starts=_list_starts,
    json_spacing=_SPACING,
)
PLAIN_JSON = CallFormat(
    "json",
    read=_read,
    written=_written,
    grammar=_grammar,
    starts=lambda _: ("{", "[", "```json"),
    exact_starts=_exact_starts,
    json_spacing=_SPACING,
)
