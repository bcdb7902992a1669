"""Chat completions: a Generation as a response, or as the chunks of one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec import UNSET, Raw

from pagewick.generation import Generation, Listener
from pagewick.outputs import CompletionOutput, FinishReason, PartDelta, PartKind, ToolCall, text_of
from pagewick.server.api.framing import Following
from pagewick.server.api.json_response import encoded
from pagewick.server.api.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ContentLogprob,
    FunctionDelta,
    ResponseMessage,
    TokenLogprob,
    ToolCallDelta,
)
from pagewick.server.api.usage import UsageReport
from pagewick.text.output_stream import ChoiceDelta, PositionLogprobs

# A global name, because looking up an attribute of an Enum takes longer and this happens for each token.
_TEXT = PartKind.TEXT


@dataclass(frozen=True, slots=True)
class ChatForm:
    """The parts of a response that the client wants. echo: text that the response's text begins with.

    is_legacy: a call is a function_call, as OpenAI had it before tools. has_tools: the request has tools.
    """

    wants_logprobs: bool = False
    wants_reasoning: bool = True
    wants_token_ids: bool = False
    echo: str = ""
    is_legacy: bool = False
    has_tools: bool = False

    def message(self, choice: CompletionOutput) -> ResponseMessage:
        """Return the parts under OpenAI's names, which have no order. The content is null if there are only calls."""
        calls = [(part.call, part.text) for part in choice.parts if part.call is not None]
        text = self.echo + text_of(choice.parts, PartKind.TEXT)
        message = ResponseMessage("assistant", text or None if calls else text)
        if self.wants_reasoning and (reasoning := text_of(choice.parts, PartKind.REASONING)):
            message.reasoning_content = message.reasoning = reasoning
        message.refusal = text_of(choice.parts, PartKind.REFUSAL) or None
        if calls and self.is_legacy:
            call, arguments = calls[0]
            message.function_call = FunctionDelta(arguments, name=call.name)
        elif calls:
            message.tool_calls = [_tool_call(call, arguments) for call, arguments in calls]
        return message

    def finish_reason(self, reason: FinishReason | None, *, has_calls: bool) -> str | None:
        if not has_calls or reason != "stop":
            return reason
        return "function_call" if self.is_legacy else "tool_calls"

    def choice(self, choice: CompletionOutput, logprobs: Sequence[PositionLogprobs]) -> ChatChoice:
        has_calls = any(part.call is not None for part in choice.parts)
        return ChatChoice(
            index=choice.index,
            message=self.message(choice),
            logprobs=_chat_logprobs(logprobs) if self.wants_logprobs else None,
            finish_reason=self.finish_reason(choice.finish_reason, has_calls=has_calls),
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self.wants_token_ids else UNSET,
        )


@dataclass(frozen=True, slots=True)
class ChatResponse:
    """The response to a request, at once or in chunks. head: the first fields of the response and of each chunk."""

    generation: Generation
    form: ChatForm
    report: UsageReport
    head: dict[str, Any]

    async def whole(self) -> ChatCompletion:
        """Run the request to its end. Each choice is encoded by itself, since together they may be large."""
        generation, form = self.generation, self.form
        logprobs: dict[int, list[PositionLogprobs]] = defaultdict(list)

        def note(delta: ChoiceDelta) -> None:
            logprobs[delta.index] += delta.logprobs or []

        async with generation:
            await generation.pass_to(Listener(note))
        choices = [
            await encoded(partial(form.choice, choice, logprobs[choice.index]), is_large=form.wants_logprobs)
            for choice in generation.output.outputs
        ]
        return self.completion(choices)

    def completion(self, choices: Sequence[ChatChoice | Raw]) -> ChatCompletion:
        """Return the response with these choices, once they are complete."""
        output = self.generation.output
        completion = ChatCompletion(**self.head, choices=choices, **self.report.for_response())
        if output.prompt_logprobs is not None:
            completion.prompt_logprobs = output.prompt_logprobs
        if self.form.wants_token_ids:
            completion.prompt_token_ids = output.prompt_token_ids
        return completion

    async def chunks(self) -> AsyncGenerator[Following | ChatCompletionChunk]:
        """Yield role, parts as they come and finish reason of each choice, then the usage if it is wanted.

        A token that completes no character gives no chunk; its log-probability goes with the next one.
        """
        async with self.generation:
            yield Following(self.generation, Chunks(self).of, self.text_chunk if self.is_plain else None)
        if (last := self.report.for_last_chunk()) is not None:
            yield self.chunk([], last)

    @property
    def is_plain(self) -> bool:
        """Whether chunks with text have nothing else that changes."""
        return self.report.is_same_for_chunks and not (self.form.wants_logprobs or self.form.wants_token_ids)

    def text_chunk(self, index: int, text: str) -> ChatCompletionChunk:
        return self.chunk([ChatChunkChoice(index, ChatDelta(content=text))], self.report.for_chunk())

    def chunk(self, choices: list[ChatChunkChoice], more: dict[str, Any]) -> ChatCompletionChunk:
        return ChatCompletionChunk(**self.head, choices=choices, **more)

    def openings(self) -> list[ChatCompletionChunk]:
        """Return the first chunks of every choice; the very first one also has the prompt's tokens."""
        # A client that adds the contents up then has null for a response with calls only, as without a stream.
        content = None if self.form.has_tools else ""
        deltas = [ChatDelta(role="assistant", content=content)]
        if self.form.echo:
            deltas.append(ChatDelta(content=self.form.echo))
        chunks = [
            self.chunk([ChatChunkChoice(choice.index, delta)], self.report.for_chunk())
            for choice in self.generation.output.outputs
            for delta in deltas
        ]
        if self.form.wants_token_ids:
            chunks[0].prompt_token_ids = self.generation.output.prompt_token_ids
        return chunks


class Chunks:
    """Makes the chunks of deltas, and of the openings of all choices before the first one."""

    def __init__(self, response: ChatResponse) -> None:
        self._response = response
        self._is_first = True
        self._pending: dict[int, _PendingDelta] = defaultdict(lambda: _PendingDelta(response.form))

    def of(self, delta: ChoiceDelta) -> list[ChatCompletionChunk]:
        chunks: list[ChatCompletionChunk] = []
        if self._is_first:
            self._is_first = False
            chunks += self._response.openings()
        report = self._response.report
        choices = self._pending[delta.index].choices(delta)
        return chunks + [self._response.chunk([choice], report.for_chunk()) for choice in choices]


class _PendingDelta:
    """Log-probabilities and tokens of one choice that no chunk has had yet."""

    def __init__(self, form: ChatForm) -> None:
        self._form = form
        self._positions: list[PositionLogprobs] = []
        self._token_ids: list[int] = []
        self._num_calls = 0

    def choices(self, delta: ChoiceDelta) -> list[ChatChunkChoice]:
        """Return one entry for each part of a delta, and one for the end of the choice."""
        form = self._form
        if delta.logprobs:
            self._positions += delta.logprobs
        if form.wants_token_ids:
            self._token_ids += delta.token_ids
        found = []
        for part in delta.parts:
            if part.kind is _TEXT:
                content: ChatDelta | None = ChatDelta(content=part.text)
                logprobs = self._take_logprobs() if form.wants_logprobs else None
            else:
                content, logprobs = self._other_content(part), None
            if content is not None:
                token_ids = self._take_token_ids() if form.wants_token_ids else UNSET
                found.append(ChatChunkChoice(delta.index, content, logprobs, token_ids=token_ids))
        if delta.finish_reason is not None:
            logprobs = self._take_logprobs() if self._positions and form.wants_logprobs else None
            reason = form.finish_reason(delta.finish_reason, has_calls=self._num_calls > 0)
            end = ChatChunkChoice(delta.index, ChatDelta(), logprobs, reason, delta.stop_reason)
            if form.wants_token_ids:
                end.token_ids = self._take_token_ids()
            found.append(end)
        return found

    def _other_content(self, part: PartDelta) -> ChatDelta | None:
        """Return a part that is not text under OpenAI's name; None if the client does not want it."""
        if part.kind is PartKind.REASONING:
            wanted = self._form.wants_reasoning
            return ChatDelta(reasoning_content=part.text, reasoning=part.text) if wanted else None
        if part.kind is PartKind.REFUSAL:
            return ChatDelta(refusal=part.text)
        assert part.call is not None, "a part of a kind that OpenAI's API has no name for"
        # Only the first delta of a call has its id and its name.
        is_new = part.call.index >= self._num_calls
        self._num_calls = max(self._num_calls, part.call.index + 1)
        if self._form.is_legacy:
            return ChatDelta(function_call=FunctionDelta(part.text, name=part.call.name if is_new else UNSET))
        call = _tool_call(part.call, part.text) if is_new else ToolCallDelta(function=FunctionDelta(part.text))
        call.index = part.call.index
        return ChatDelta(tool_calls=[call])

    def _take_logprobs(self) -> ChatLogprobs:
        taken, self._positions = self._positions, []
        return _chat_logprobs(taken)

    def _take_token_ids(self) -> list[int]:
        taken, self._token_ids = self._token_ids, []
        return taken


def _tool_call(call: ToolCall, arguments: str) -> ToolCallDelta:
    return ToolCallDelta(id=call.call_id, type="function", function=FunctionDelta(arguments, name=call.name))


def _chat_logprobs(positions: Sequence[PositionLogprobs]) -> ChatLogprobs:
    return ChatLogprobs(content_logprobs(positions))


def content_logprobs(positions: Sequence[PositionLogprobs]) -> list[ContentLogprob]:
    return [
        ContentLogprob(
            token=one.chosen.token,
            logprob=one.chosen.logprob,
            bytes=list(one.chosen.shown),
            top_logprobs=[TokenLogprob(other.token, other.logprob, list(other.shown)) for other in one.top],
        )
        for one in positions
    ]
