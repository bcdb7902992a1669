"""LFM2: a list of calls as Python writes them, between tokens; a list of JSON objects where a prompt asks for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from pagewick.text.tool_calls.grammar import GrammarWriter
from pagewick.text.tool_calls.offer import ToolOffer
from pagewick.text.tool_calls.python_calls import entries, python_call, read_python_call
from pagewick.text.tool_calls.reading import Reader, Reading, no_write, read_envelope
from pagewick.text.tool_calls.splitter import CallFormat
from pagewick.text.tool_calls.written import WrittenCall

_OPENER, _CLOSER = "<|tool_call_start|>", "<|tool_call_end|>"


def _read(reader: Reader, offer: ToolOffer) -> Reading[None]:
    yield from reader.blanks()
    yield from reader.char("[", no_write)
    yield from entries(reader, "]", lambda: _read_call(reader, offer), no_write)
    yield from reader.blanks()
    yield from reader.word(_CLOSER, may_end=True)


def _read_call(reader: Reader, offer: ToolOffer) -> Reading[None]:
    if (yield from reader.peek()) == "{":
        yield from read_envelope(reader)
    else:
        yield from read_python_call(reader, offer)
    reader.calls.commit()


def _written(calls: Sequence[WrittenCall]) -> str:
    return f"{_OPENER}[{', '.join(map(_written_call, calls))}]{_CLOSER}"


def _written_call(call: WrittenCall) -> str:
    return f"{call.name}({', '.join(f'{key}={_shown(value)}' for key, value in call.pairs.items())})"


def _shown(value: Any) -> str:
    """Write a value as the family's templates do: strings in double quotes, objects as JSON, all else as Python."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | dict) else repr(value)


def _grammar(writer: GrammarWriter) -> str:
    call = writer.call(partial(python_call, writer, has_json_words=True))
    calls = f"{writer.word('[')} {writer.calls(call, writer.word(', '))} {writer.words(']', _CLOSER)}"
    return writer.grammar(calls, (_OPENER,))


LFM_2 = CallFormat(
    "lfm2",
    read=_read,
    written=_written,
    grammar=_grammar,
    words=(_OPENER, _CLOSER),
    openers=(_OPENER,),
    has_result_role=True,
)
