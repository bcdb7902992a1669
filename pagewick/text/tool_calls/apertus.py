"""Apertus: a list of JSON objects between tokens, each of which has the tool's name as its only key."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pagewick.text.tool_calls.grammar import GrammarWriter
from pagewick.text.tool_calls.offer import ToolOffer
from pagewick.text.tool_calls.reading import Reader, Reading, no_write, read_arguments
from pagewick.text.tool_calls.splitter import CallFormat
from pagewick.text.tool_calls.written import WrittenCall

_OPENER, _CLOSER = "<|tools_prefix|>", "<|tools_suffix|>"


def _read(reader: Reader, offer: ToolOffer) -> Reading[None]:
    yield from reader.blanks()
    yield from reader.char("[", no_write)
    yield from reader.blanks()
    more = True
    while more:
        yield from reader.char("{", no_write)
        yield from reader.blanks()
        reader.calls.begin((yield from reader.text()))
        yield from reader.blanks()
        yield from reader.char(":", no_write)
        yield from read_arguments(reader)
        yield from reader.blanks()
        yield from reader.char("}", no_write)
        reader.calls.commit()
        more = yield from reader.goes_on("]", no_write)
    yield from reader.blanks()
    yield from reader.word(_CLOSER, may_end=True)


def _written(calls: Sequence[WrittenCall]) -> str:
    return f"{_OPENER}[{', '.join(f'{{{json.dumps(call.name)}: {call.arguments}}}' for call in calls)}]{_CLOSER}"


def _grammar(writer: GrammarWriter) -> str:
    call = writer.call(lambda tool: f'{writer.word(f"{{{json.dumps(tool.name)}: ")} {writer.arguments(tool)} "}}"')
    calls = f"{writer.word('[')} {writer.calls(call, writer.word(', '))} {writer.words(']', _CLOSER)}"
    return writer.grammar(calls, (_OPENER,))


APERTUS = CallFormat(
    "apertus", read=_read, written=_written, grammar=_grammar, words=(_OPENER, _CLOSER), openers=(_OPENER,)
)
