"""MiniMax-M1: JSON objects on lines of a section; MiniMax-M2: invocations with parameters in tags."""

from __future__ import annotations

from collections.abc import Sequence

from pagewick.text.tool_calls.grammar import GrammarWriter
from pagewick.text.tool_calls.offer import ToolOffer
from pagewick.text.tool_calls.reading import END, Reader, Reading, read_envelope
from pagewick.text.tool_calls.splitter import CallFormat
from pagewick.text.tool_calls.tagged import TaggedCalls
from pagewick.text.tool_calls.written import WrittenCall, envelope

_OPENER, _CLOSER = "<tool_calls>", "</tool_calls>"


def _read(reader: Reader, offer: ToolOffer) -> Reading[None]:
    while (first := (yield from reader.blanks())) != reader.spell(_CLOSER)[0]:
        if first == END:
            return
        yield from read_envelope(reader)
        reader.calls.commit()
    yield from reader.word(_CLOSER, may_end=True)


def _written(calls: Sequence[WrittenCall]) -> str:
    return "\n".join([_OPENER, *map(envelope, calls), _CLOSER])


def _grammar(writer: GrammarWriter) -> str:
    calls = writer.calls(writer.call(writer.envelope), writer.word("\n"))
    return writer.grammar(f"{writer.word(chr(10))} {calls} {writer.words(chr(10), _CLOSER)}", (_OPENER,))


MINIMAX_M1 = CallFormat(
    "minimax_m1", read=_read, written=_written, grammar=_grammar, words=(_OPENER, _CLOSER), openers=(_OPENER,)
)
MINIMAX_M2 = TaggedCalls(
    opener="<minimax:tool_call>",
    closer="</minimax:tool_call>",
    call_open='<invoke name="',
    name_end='">',
    key_open='<parameter name="',
    key_end=('">',),
    value_end="</parameter>",
    call_close="</invoke>",
    is_section=True,
).format("minimax_m2")
