"""Chat completions: what a request gives, as an answer or as chunks of one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec import UNSET, Raw, UnsetType

from pagewick.generation import Generation
from pagewick.outputs import CompletionOutput
from pagewick.server.api.json_answer import encoded
from pagewick.server.api.responses import (
    AnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ContentLogprob,
    TokenLogprob,
)
from pagewick.server.api.usage import Figures
from pagewick.text.output_stream import ChoiceDelta, PositionLogprobs


@dataclass(frozen=True, slots=True)
class ChatForm:
    """What a client wants to see. echo: text that the answer's begins with."""

    wants_logprobs: bool = False
    wants_reasoning: bool = True
    wants_token_ids: bool = False
    echo: str = ""

    def message(self, choice: CompletionOutput) -> AnswerMessage:
        reasoning = choice.reasoning if choice.reasoning and self.wants_reasoning else UNSET
        text = self.echo + choice.text
        return AnswerMessage("assistant", text, reasoning_content=reasoning, reasoning=reasoning)


async def chat_choices(generation: Generation, form: ChatForm, figures: Figures) -> list[Raw]:
    """Run the request to its end. Each choice is JSON: together they may be large."""
    logprobs: dict[int, list[PositionLogprobs]] = defaultdict(list)
    async with generation:
        async for delta in generation:
            figures.observe(delta)
            logprobs[delta.index] += delta.logprobs or []
    return [
        await encoded(partial(_whole, choice, form, logprobs[choice.index]), is_large=form.wants_logprobs)
        for choice in generation.output.outputs
    ]


def _whole(choice: CompletionOutput, form: ChatForm, logprobs: Sequence[PositionLogprobs]) -> ChatChoice:
    return ChatChoice(
        index=choice.index,
        message=form.message(choice),
        logprobs=_chat_logprobs(logprobs) if form.wants_logprobs else None,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        token_ids=choice.token_ids if form.wants_token_ids else UNSET,
    )


async def chat_chunks(
    generation: Generation, form: ChatForm, figures: Figures, new_chunk: Callable[..., ChatCompletionChunk]
) -> AsyncGenerator[ChatCompletionChunk]:
    """Role, thoughts, content and finish reason of each choice, then the usage if it is wanted.

    A token that completes no character gives no chunk; its log-probability goes with the next one.
    """
    unsaid: dict[int, _Unsaid] = defaultdict(lambda: _Unsaid(form))
    is_first = True
    async with generation:
        async for delta in generation:
            figures.observe(delta)
            if is_first:
                is_first = False
                for opening in _openings(generation, form):
                    yield new_chunk(**opening, **figures.of_chunk())
            for choice in unsaid[delta.index].choices(delta):
                yield new_chunk(choices=[choice], **figures.of_chunk())
    if (last := figures.of_last_chunk()) is not None:
        yield new_chunk(choices=[], **last)


def _openings(generation: Generation, form: ChatForm) -> list[dict[str, Any]]:
    """What every choice begins with; the first also tells of the prompt."""
    chunks: list[dict[str, Any]] = []
    for choice in generation.output.outputs:
        chunks.append({"choices": [ChatChunkChoice(choice.index, ChatDelta(role="assistant", content=""))]})
        if form.echo:
            chunks.append({"choices": [ChatChunkChoice(choice.index, ChatDelta(content=form.echo))]})
    if form.wants_token_ids:
        chunks[0]["prompt_token_ids"] = generation.output.prompt_token_ids
    return chunks


class _Unsaid:
    """What of one choice has come and is in no chunk yet."""

    def __init__(self, form: ChatForm) -> None:
        self._form = form
        self._positions: list[PositionLogprobs] = []
        self._token_ids: list[int] = []

    def choices(self, delta: ChoiceDelta) -> list[ChatChunkChoice]:
        """The chunks that a delta gives: thoughts, content, end."""
        self._positions += delta.logprobs or []
        self._token_ids += delta.token_ids
        said = []
        if delta.reasoning and self._form.wants_reasoning:
            thoughts = ChatDelta(reasoning_content=delta.reasoning, reasoning=delta.reasoning)
            said.append(ChatChunkChoice(delta.index, thoughts, token_ids=self._take_token_ids()))
        if delta.text:
            content = ChatDelta(content=delta.text)
            said.append(ChatChunkChoice(delta.index, content, self._take_logprobs(), token_ids=self._take_token_ids()))
        if delta.finish_reason is not None:
            logprobs = self._take_logprobs() if self._positions else None
            end = ChatChunkChoice(delta.index, ChatDelta(), logprobs, delta.finish_reason, delta.stop_reason)
            end.token_ids = self._take_token_ids()
            said.append(end)
        return said

    def _take_logprobs(self) -> ChatLogprobs | None:
        if not self._form.wants_logprobs:
            return None
        taken, self._positions = self._positions, []
        return _chat_logprobs(taken)

    def _take_token_ids(self) -> list[int] | UnsetType:
        if not self._form.wants_token_ids:
            return UNSET
        taken, self._token_ids = self._token_ids, []
        return taken


def _chat_logprobs(positions: Sequence[PositionLogprobs]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ContentLogprob(
                token=one.chosen.token,
                logprob=one.chosen.logprob,
                bytes=one.chosen.bytes,
                top_logprobs=[TokenLogprob(other.token, other.logprob, other.bytes) for other in one.top],
            )
            for one in positions
        ]
    )
