"""FireFunction v2: the word `functools` and a JSON list."""

from __future__ import annotations

from collections.abc import Sequence

from pagewick.text.tool_calls.grammar import GrammarWriter
from pagewick.text.tool_calls.offer import ToolOffer
from pagewick.text.tool_calls.python_calls import entries
from pagewick.text.tool_calls.reading import Reader, Reading, no_write, read_envelope
from pagewick.text.tool_calls.splitter import CallFormat
from pagewick.text.tool_calls.written import WrittenCall, envelope

# With the bracket: programs in Python may name the module functools.
_OPENER = "functools["


def _read(reader: Reader, offer: ToolOffer) -> Reading[None]:
    yield from entries(reader, "]", lambda: _read_call(reader), no_write)


def _read_call(reader: Reader) -> Reading[None]:
    yield from read_envelope(reader)
    reader.calls.commit()


def _written(calls: Sequence[WrittenCall]) -> str:
    return f"{_OPENER}{', '.join(map(envelope, calls))}]"


def _grammar(writer: GrammarWriter) -> str:
    calls = writer.calls(writer.call(writer.envelope), writer.word(", "))
    return writer.grammar(f'{calls} "]"', (_OPENER,))


FIREFUNCTION_2 = CallFormat("firefunction", read=_read, written=_written, grammar=_grammar, openers=(_OPENER,))
