"""Mistral: a JSON list after a token (tokenizers v1 to v7), or a name and JSON, each with the token (from v11)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from pagewick.text.tool_calls.grammar import GrammarWriter
from pagewick.text.tool_calls.offer import Tool, ToolOffer
from pagewick.text.tool_calls.reading import NoCall, Reader, Reading, read_arguments, read_envelopes
from pagewick.text.tool_calls.splitter import CallFormat
from pagewick.text.tool_calls.written import WrittenCall, envelope

_OPENER, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ID_READ = re.compile(r"\s*[\w-]*\s*")
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")


def _read(reader: Reader, offer: ToolOffer) -> Reading[None]:
    if (yield from reader.blanks()) in ("[", "{"):
        yield from read_envelopes(reader)
        return
    name = yield from reader.until([_ID, _ARGUMENTS], limit=160)
    reader.calls.begin(name.strip())
    if reader.ended_by == _ID:
        call_id = yield from reader.until([_ARGUMENTS], limit=160)
        if not _ID_READ.fullmatch(call_id):
            raise NoCall
    yield from read_arguments(reader)


def _written_list(calls: Sequence[WrittenCall]) -> str:
    return f"{_OPENER}[{', '.join(map(envelope, calls))}]"


def _list_grammar(writer: GrammarWriter) -> str:
    call = writer.call(writer.envelope)
    return writer.grammar(f'" "? "[" {writer.calls(call, writer.word(", "))} "]"', (_OPENER,))


def _written_each(calls: Sequence[WrittenCall]) -> str:
    return "".join(f"{_OPENER}{call.name}{_ARGUMENTS}{call.arguments}" for call in calls)


def _each_grammar(writer: GrammarWriter) -> str:
    def of_tool(tool: Tool) -> str:
        return f"{writer.word(tool.name)} {between} {writer.arguments(tool)}"

    between = writer.rule(f"({writer.word(_ID)} /[a-zA-Z0-9]{{9}}/)? {writer.word(_ARGUMENTS)}")
    return writer.grammar(writer.calls(writer.call(of_tool), writer.word(_OPENER)), (_OPENER,))


def nine_characters(call_id: str, name: str, place: int) -> str:
    """Return the id that the templates accept: it stays if it fits, and otherwise always becomes the same one."""
    return call_id if _SHORT_ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]


MISTRAL = CallFormat(
    "mistral",
    read=_read,
    written=_written_list,
    grammar=_list_grammar,
    words=(_OPENER, _ID, _ARGUMENTS),
    openers=(_OPENER,),
    prompt_id=nine_characters,
)
MISTRAL_11 = CallFormat(
    "mistral_v11",
    read=_read,
    written=_written_each,
    grammar=_each_grammar,
    words=(_OPENER, _ID, _ARGUMENTS),
    openers=(_OPENER,),
    prompt_id=nine_characters,
)
