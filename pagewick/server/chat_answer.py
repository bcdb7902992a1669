"""Chat completions: what a request gives, as an answer or as chunks of one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial

from pagewick.generation import Generation
from pagewick.server.responses import (
    AnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ContentLogprob,
    TokenLogprob,
)
from pagewick.server.usage import usage_of
from pagewick.text.output_stream import PositionLogprobs


async def chat_choices(generation: Generation, *, wants_logprobs: bool) -> list[ChatChoice]:
    """Run the request to its end."""
    logprobs: dict[int, list[PositionLogprobs]] = defaultdict(list)
    async with generation:
        async for delta in generation:
            logprobs[delta.index] += delta.logprobs or []
    return [
        ChatChoice(
            index=choice.index,
            message=AnswerMessage("assistant", choice.text),
            logprobs=_chat_logprobs(logprobs[choice.index]) if wants_logprobs else None,
            finish_reason=choice.finish_reason,
        )
        for choice in generation.output.outputs
    ]


async def chat_chunks(
    generation: Generation, new_chunk: Callable[..., ChatCompletionChunk], *, wants_usage: bool
) -> AsyncGenerator[ChatCompletionChunk]:
    """Role, content, finish reason of each choice, then the usage if it is wanted.

    A token that completes no character gives no chunk; its log-probability goes with the next one.
    """
    if wants_usage:
        new_chunk = partial(new_chunk, usage=None)
    held: dict[int, list[PositionLogprobs]] = defaultdict(list)
    is_first = True
    async with generation:
        async for delta in generation:
            if is_first:
                for choice in generation.output.outputs:
                    yield new_chunk(choices=[ChatChunkChoice(choice.index, ChatDelta(role="assistant", content=""))])
                is_first = False
            held[delta.index] += delta.logprobs or []
            if delta.text:
                logprobs = _chat_logprobs(held.pop(delta.index)) if delta.logprobs is not None else None
                yield new_chunk(choices=[ChatChunkChoice(delta.index, ChatDelta(content=delta.text), logprobs)])
            if delta.finish_reason is not None:
                logprobs = _chat_logprobs(held[delta.index]) if held[delta.index] else None
                yield new_chunk(choices=[ChatChunkChoice(delta.index, ChatDelta(), logprobs, delta.finish_reason)])
    if wants_usage:
        yield new_chunk(choices=[], usage=usage_of([generation]))


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
