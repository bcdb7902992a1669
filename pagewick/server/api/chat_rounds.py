"""Chat completions with tools of the server's own: all rounds of a request as one response, or as the chunks of one."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from msgspec import UNSET, structs

from pagewick.generation import Listener
from pagewick.outputs import CompletionOutput, PartDelta
from pagewick.server.api.chat_response import ChatResponse, Chunks
from pagewick.server.api.framing import Following
from pagewick.server.api.json_response import encoded
from pagewick.server.api.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ServerToolCall,
)
from pagewick.server.core.tool_rounds import ToolRounds, ToolRun
from pagewick.text.output_stream import ChoiceDelta, PositionLogprobs

# Between the texts of two rounds, and between the thoughts.
SEAM = "\n\n"


@dataclass(frozen=True, slots=True)
class RoundsResponse:
    """The response of all rounds. of_first: renders the first one alone; its report counts all Generations.

    Texts, thoughts, tokens and log-probabilities of all rounds follow each other. Calls of the server's tools are
    server_tool_calls, calls of the client's tools are tool_calls, as always.
    """

    rounds: ToolRounds
    of_first: ChatResponse

    async def whole(self) -> ChatCompletion:
        """Run all rounds."""
        rounds, of_first = self.rounds, self.of_first
        logprobs: list[PositionLogprobs] = []
        joined = CompletionOutput(0)
        while not rounds.is_over:
            generation = rounds.generations[-1]
            async with generation:
                await generation.pass_to(Listener(lambda delta: logprobs.extend(delta.logprobs or ())))
            shown = _Shown(rounds)
            joined.parts += [part for given in rounds.choice.parts if (part := shown.part(given)) is not None]
            joined.token_ids += rounds.choice.token_ids
            async with aclosing(rounds.run_calls()) as runs:
                async for _ in runs:
                    pass
        joined.finish_reason, joined.stop_reason = rounds.finish_reason, rounds.stop_reason
        render = partial(self._choice, joined, logprobs)
        return of_first.completion([await encoded(render, is_large=of_first.form.wants_logprobs)])

    def _choice(self, joined: CompletionOutput, logprobs: list[PositionLogprobs]) -> ChatChoice:
        choice = self.of_first.form.choice(joined, logprobs)
        if self.rounds.runs:
            choice.message.server_tool_calls = [_whole_call(run) for run in self.rounds.runs]
            # As with calls of the client's tools only.
            choice.message.content = choice.message.content or None
        return choice

    async def chunks(self) -> AsyncGenerator[Following | ChatCompletionChunk]:
        """Yield the chunks of all rounds, with the calls of the server's tools between them, and the end of all."""
        rounds, of_first = self.rounds, self.of_first
        chunks = Chunks(of_first)
        while not rounds.is_over:
            generation = rounds.generations[-1]
            is_first = len(rounds.generations) == 1
            async with generation:
                # In later rounds a text may begin with a seam.
                text_chunk = of_first.text_chunk if is_first and of_first.is_plain else None
                yield Following(generation, partial(_chunks_of, chunks, _Shown(rounds)), text_chunk)
            begun: set[int] = set()
            async with aclosing(rounds.run_calls()) as runs:
                async for run in runs:
                    call = _end_of_call(run) if run.index in begun else _begun_call(run)
                    begun.add(run.index)
                    choice = ChatChunkChoice(0, ChatDelta(server_tool_calls=[call]))
                    yield of_first.chunk([choice], of_first.report.for_chunk())
        end = ChoiceDelta(0, finish_reason=rounds.finish_reason, stop_reason=rounds.stop_reason)
        for chunk in chunks.of(end):
            yield chunk
        if (last := of_first.report.for_last_chunk()) is not None:
            yield of_first.chunk([], last)


def _chunks_of(chunks: Chunks, shown: _Shown, delta: ChoiceDelta) -> list[ChatCompletionChunk]:
    """Return the chunks of one round's delta. Whether the response ends with the round is known only later."""
    parts = [part for given in delta.parts if (part := shown.part(given)) is not None]
    return chunks.of(structs.replace(delta, parts=parts, finish_reason=None, stop_reason=None))


class _Shown:
    """The parts of one round as the client sees them: with a seam, and without the calls of the server's tools."""

    def __init__(self, rounds: ToolRounds) -> None:
        self._rounds = rounds
        before = [generation.output.outputs[0].parts for generation in rounds.generations[:-1]]
        self._seams = {part.kind for parts in before for part in parts if part.call is None and part.text}
        self._places: dict[int, int] = {}

    def part(self, part: PartDelta) -> PartDelta | None:
        """Return a part of the round, or a piece of one; None if the client does not see it."""
        if part.call is not None:
            if not self._rounds.is_clients(part.call.name):
                return None
            place = self._places.setdefault(part.call.index, len(self._places))
            return PartDelta(part.kind, part.text, replace(part.call, index=place))
        if part.kind not in self._seams or not part.text:
            return part
        self._seams.remove(part.kind)
        return PartDelta(part.kind, SEAM + part.text)


def _whole_call(run: ToolRun) -> ServerToolCall:
    return ServerToolCall(
        run.index, run.round, run.call_id, run.name, run.arguments, result=run.result or "", is_error=run.is_error
    )


def _begun_call(run: ToolRun) -> ServerToolCall:
    """A call that will not run has its result at once."""
    whole = _whole_call(run)
    return whole if run.result is not None else structs.replace(whole, result=UNSET, is_error=UNSET)


def _end_of_call(run: ToolRun) -> ServerToolCall:
    return ServerToolCall(run.index, result=run.result or "", is_error=run.is_error)
