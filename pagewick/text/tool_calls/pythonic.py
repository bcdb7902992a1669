"""Pythonic: a list of calls as Python writes them, at the beginning of a response or, in Llama 4, between tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pagewick.text.tool_calls.grammar import GrammarWriter
from pagewick.text.tool_calls.offer import ToolOffer
from pagewick.text.tool_calls.python_calls import entries, python_call, read_python_call, written_python
from pagewick.text.tool_calls.reading import Reader, Reading, no_write
from pagewick.text.tool_calls.splitter import CallFormat
from pagewick.text.tool_calls.written import WrittenCall

_OPENER, _CLOSER = "<|python_start|>", "<|python_end|>"


def _read(reader: Reader, offer: ToolOffer) -> Reading[None]:
    yield from reader.blanks()
    yield from reader.char("[", no_write)
    yield from entries(reader, "]", lambda: _read_call(reader, offer), no_write)
    if reader.opener:
        yield from reader.blanks()
        yield from reader.word(_CLOSER, may_end=True)


def _read_call(reader: Reader, offer: ToolOffer) -> Reading[None]:
    yield from read_python_call(reader, offer)
    reader.calls.commit()


def _written(calls: Sequence[WrittenCall]) -> str:
    return f"[{', '.join(map(written_python, calls))}]"


def _grammar(writer: GrammarWriter) -> str:
    first, other = (writer.call(partial(python_call, writer, before=before)) for before in ("[", ""))
    calls = f'{first} (", " {other})* "]"' if writer.offer.is_parallel else f'{first} "]"'
    return writer.grammar(calls, (), start=rf"\s*\[\s*({writer.names})\s*\((?s:.*)")


PYTHONIC = CallFormat(
    "pythonic",
    read=_read,
    written=_written,
    grammar=_grammar,
    words=(_OPENER, _CLOSER),
    openers=(_OPENER,),
    starts=lambda _: ("[",),
    exact_starts=lambda offer: [f"[{tool.name}(" for tool in offer.tools],
)
