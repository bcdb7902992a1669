"""OLMo 3: calls as Python writes them, each on a line of its own, between tags; their values are JSON or Python."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

from pagewick.text.tool_calls.grammar import GrammarWriter
from pagewick.text.tool_calls.offer import ToolOffer
from pagewick.text.tool_calls.python_calls import python_call, read_python_call
from pagewick.text.tool_calls.reading import Reader, Reading
from pagewick.text.tool_calls.splitter import CallFormat
from pagewick.text.tool_calls.written import WrittenCall

_OPENER, _CLOSER = "<function_calls>", "</function_calls>"


def _read(reader: Reader, offer: ToolOffer) -> Reading[None]:
    while (yield from reader.blanks()) != reader.spell(_CLOSER)[0]:
        yield from read_python_call(reader, offer)
        reader.calls.commit()
    yield from reader.word(_CLOSER, may_end=True)


def _written(calls: Sequence[WrittenCall]) -> str:
    return f"{_OPENER}{chr(10).join(map(_written_call, calls))}{_CLOSER}"


def _written_call(call: WrittenCall) -> str:
    pairs = (f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in call.pairs.items())
    return f"{call.name}({', '.join(pairs)})"


def _grammar(writer: GrammarWriter) -> str:
    call = writer.call(partial(python_call, writer, has_json_words=True))
    return writer.grammar(f"{writer.calls(call, writer.word(chr(10)))} {writer.word(_CLOSER)}", (_OPENER,))


OLMO_3 = CallFormat(
    "olmo3", read=_read, written=_written, grammar=_grammar, words=(_OPENER, _CLOSER), openers=(_OPENER,)
)
