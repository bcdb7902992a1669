"""JSON without a marker, at the beginning of a response: Llama 3, where a token may precede it, and any other model."""

from __future__ import annotations

from collections.abc import Sequence

from pagewick.errors import UnsupportedError
from pagewick.text.tool_calls.grammar import GrammarWriter
from pagewick.text.tool_calls.offer import ToolOffer
from pagewick.text.tool_calls.python_calls import read_python_call
from pagewick.text.tool_calls.reading import END, Reader, Reading, no_write, read_envelope, read_envelopes
from pagewick.text.tool_calls.splitter import CallFormat
from pagewick.text.tool_calls.written import WrittenCall, envelope

_PYTHON_TAG = "<|python_tag|>"
# Texts for which the grammar of an optional call provides no way but a call.
_START = r"\s*(\[\s*)?\{\s*\"name\"(?s:.*)"


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


def _grammar(writer: GrammarWriter, *openers: str) -> str:
    if writer.offer.has_form:
        message = (
            "structured_outputs cannot be combined with tools here: this model's calls are JSON without a marker, "
            "which other JSON could resemble; leave one of them out, or set tool_choice to none or required"
        )
        raise UnsupportedError(message, param="structured_outputs")
    call = writer.call(lambda tool: writer.envelope(tool, arguments="parameters"))
    return writer.grammar(writer.calls(call, writer.word("; ")), openers, start=_START)


LLAMA_3 = CallFormat(
    "llama3_json",
    read=_read,
    written=_written,
    grammar=lambda writer: _grammar(writer, _PYTHON_TAG),
    words=(_PYTHON_TAG,),
    openers=(_PYTHON_TAG,),
    starts=lambda _: ("{",),
)
PLAIN_JSON = CallFormat("json", read=_read, written=_written, grammar=_grammar, starts=lambda _: ("{", "[", "```json"))
