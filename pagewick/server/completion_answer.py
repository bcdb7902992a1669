"""Text completions: what requests give, as an answer or as chunks of one."""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial

from msgspec import UNSET

from pagewick.generation import Generation, interleave
from pagewick.sampling_params import SamplingParams
from pagewick.server.responses import Completion, CompletionChoice, CompletionLogprobs
from pagewick.server.usage import usage_of
from pagewick.text.output_stream import PositionLogprobs


async def completion_choices(generations: Sequence[Generation], params: SamplingParams) -> list[CompletionChoice]:
    """Run the requests to their end. Choice i of prompt p has the index p * n + i."""
    logprobs: dict[int, _CompletionLogprobs] = defaultdict(_CompletionLogprobs)
    async with aclosing(interleave(generations)) as deltas:
        async for position, delta in deltas:
            logprobs[position * params.n + delta.index].add(delta.logprobs or [])
    return [
        CompletionChoice(
            index=index,
            text=choice.text,
            logprobs=None if params.logprobs is None else logprobs[index].take(),
            finish_reason=choice.finish_reason,
            prompt_logprobs=UNSET if request.prompt_logprobs is None else request.prompt_logprobs,
        )
        for index, (request, choice) in enumerate(
            (one.output, choice) for one in generations for choice in one.output.outputs
        )
    ]


async def completion_chunks(
    generations: Sequence[Generation],
    params: SamplingParams,
    new_chunk: Callable[..., Completion],
    *,
    wants_usage: bool,
) -> AsyncGenerator[Completion]:
    """Text, with the last of it the finish reason, of each choice; then the usage if it is wanted."""
    if wants_usage:
        new_chunk = partial(new_chunk, usage=None)
    held: dict[int, _CompletionLogprobs] = defaultdict(_CompletionLogprobs)
    async with aclosing(interleave(generations)) as deltas:
        async for position, delta in deltas:
            index = position * params.n + delta.index
            held[index].add(delta.logprobs or [])
            if delta.text or delta.finish_reason is not None:
                logprobs = None if params.logprobs is None else held[index].take()
                yield new_chunk(choices=[CompletionChoice(index, delta.text, logprobs, delta.finish_reason)])
    if wants_usage:
        yield new_chunk(choices=[], usage=usage_of(generations))


class _CompletionLogprobs:
    """Collects one choice's log-probabilities in the form of /v1/completions, where tokens have text offsets."""

    def __init__(self) -> None:
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._positions: list[tuple[int, PositionLogprobs]] = []

    def add(self, positions: Sequence[PositionLogprobs]) -> None:
        for one in positions:
            self._positions.append((self._offset, one))
            self._offset += len(self._decoder.decode(bytes(one.chosen.bytes)))

    def take(self) -> CompletionLogprobs:
        """What has been added since the last time."""
        taken, self._positions = self._positions, []
        return CompletionLogprobs(
            tokens=[one.chosen.token for _, one in taken],
            token_logprobs=[one.chosen.logprob for _, one in taken],
            # Best first, so that of tokens with the same text the best one is named.
            top_logprobs=[{other.token: other.logprob for other in reversed(one.top)} for _, one in taken],
            text_offset=[offset for offset, _ in taken],
        )
