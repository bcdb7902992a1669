"""GLM-4: the function's name on a line, followed by JSON; since GLM-4.5, keys and values in tags."""

from __future__ import annotations

from collections.abc import Sequence

from pagewick.text.tool_calls.grammar import GrammarWriter
from pagewick.text.tool_calls.offer import ToolOffer
from pagewick.text.tool_calls.reading import Reader, Reading, read_arguments
from pagewick.text.tool_calls.splitter import CallFormat
from pagewick.text.tool_calls.tagged import TaggedCalls
from pagewick.text.tool_calls.written import WrittenCall


def _read(reader: Reader, offer: ToolOffer) -> Reading[None]:
    reader.calls.begin((yield from reader.until(["\n"], limit=160)).strip())
    yield from read_arguments(reader)


def _written(calls: Sequence[WrittenCall]) -> str:
    return "\n".join(f"{call.name}\n{call.arguments}" for call in calls)


def _starts(offer: ToolOffer) -> list[str]:
    return [f"{tool.name}\n" for tool in offer.tools]


def _grammar(writer: GrammarWriter) -> str:
    call = writer.call(lambda tool: f"{writer.word(f'{tool.name}{chr(10)}')} {writer.arguments(tool)}")
    # A response has one call: a second one could not be told from text.
    return writer.grammar(call, (), start=rf"\s*({writer.names})\n(?s:.*)")


GLM_4 = CallFormat(
    "glm4",
    read=_read,
    written=_written,
    grammar=_grammar,
    starts=_starts,
    exact_starts=_starts,
)
GLM_4_5 = TaggedCalls(
    opener="<tool_call>",
    closer="</tool_call>",
    call_open="",
    name_end="\n",
    key_open="<arg_key>",
    key_end=("</arg_key>", "<arg_value>"),
    value_end="</arg_value>",
    call_close="</tool_call>",
).format("glm45")
