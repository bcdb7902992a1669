"""Text completions: what requests give, as an answer or as chunks of one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from pagewick.generation import Generation, interleave
from pagewick.outputs import CompletionOutput
from pagewick.server.api.logprobs import ChoiceLogprobs, EchoedPrompt
from pagewick.server.api.responses import Completion, CompletionChoice, CompletionLogprobs
from pagewick.server.api.usage import Figures
from pagewick.text.output_stream import ChoiceDelta
from pagewick.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CompletionForm:
    """What a client wants to see of n choices per prompt. echoes: one for each prompt, or none at all."""

    tokenizer: Tokenizer
    n: int = 1
    num_logprobs: int | None = None
    wants_prompt_logprobs: bool = False
    wants_token_ids: bool = False
    echoes: Sequence[EchoedPrompt] = ()

    def echo_text(self, position: int) -> str:
        return self.echoes[position].text if self.echoes else ""

    def echo_logprobs(self, position: int, generation: Generation) -> CompletionLogprobs | None:
        """Of the prompt, once its log-probabilities are known."""
        if self.num_logprobs is None or not self.echoes:
            return None
        known = generation.output.prompt_logprobs or []
        return self.echoes[position].logprobs(self.tokenizer, known, self.num_logprobs)

    def choices(self, generations: Sequence[Generation]) -> list[_Choice]:
        """Choice i of prompt p has the index p * n + i."""
        return [_Choice(self, p, i, generation) for p, generation in enumerate(generations) for i in range(self.n)]


async def completion_choices(
    generations: Sequence[Generation], form: CompletionForm, figures: Figures
) -> list[CompletionChoice]:
    """Run the requests to their end."""
    choices = form.choices(generations)
    async with aclosing(interleave(generations)) as deltas:
        async for position, delta in deltas:
            figures.observe(delta)
            choices[position * form.n + delta.index].add(delta)
    return [choice.whole() for choice in choices]


async def completion_chunks(
    generations: Sequence[Generation], form: CompletionForm, figures: Figures, new_chunk: Callable[..., Completion]
) -> AsyncGenerator[Completion]:
    """Text, with the last of it the finish reason, of each choice; then the usage if it is wanted."""
    choices = form.choices(generations)
    unopened = set(range(len(generations)))
    async with aclosing(interleave(generations)) as deltas:
        async for position, delta in deltas:
            figures.observe(delta)
            # Before that not all of the prompt has been computed.
            if position in unopened and (delta.token_ids or delta.finish_reason is not None):
                unopened.remove(position)
                for choice in choices[position * form.n : (position + 1) * form.n]:
                    if (opening := choice.opening()) is not None:
                        yield new_chunk(choices=[opening], **figures.of_chunk())
            choice = choices[position * form.n + delta.index]
            choice.add(delta)
            if delta.text or delta.finish_reason is not None:
                yield new_chunk(choices=[choice.next(delta)], **figures.of_chunk())
    if (last := figures.of_last_chunk()) is not None:
        yield new_chunk(choices=[], **last)


class _Choice:
    """One choice of one prompt, as it grows."""

    def __init__(self, form: CompletionForm, position: int, place: int, generation: Generation) -> None:
        self._form = form
        self._position = position
        self._place = place
        self._generation = generation
        self._index = position * form.n + place
        self._token_ids: list[int] = []
        self._logprobs = ChoiceLogprobs(len(form.echo_text(position)))

    def add(self, delta: ChoiceDelta) -> None:
        self._logprobs.add(delta.logprobs or [])
        self._token_ids += delta.token_ids
        # Who scores a prompt that is echoed leaves out as many positions at its end as were generated, the token that
        # ended the text among them.
        known = self._output.logprobs
        if self._form.echoes and known and len(delta.logprobs or []) < len(delta.token_ids):
            self._logprobs.add_end(known[-1])

    def opening(self) -> CompletionChoice | None:
        """What a stream says before the first token: the prompt, if it is wanted as text or as tokens."""
        form = self._form
        if not form.echoes and not form.wants_token_ids:
            return None
        logprobs = form.echo_logprobs(self._position, self._generation)
        choice = CompletionChoice(self._index, form.echo_text(self._position), logprobs)
        choice.prompt_token_ids = self._prompt_token_ids()
        return choice

    def next(self, delta: ChoiceDelta) -> CompletionChoice:
        """What has been added since the last time, the delta last."""
        logprobs = None if self._form.num_logprobs is None else self._logprobs.take()
        choice = CompletionChoice(self._index, delta.text, logprobs, delta.finish_reason, delta.stop_reason)
        if self._form.wants_token_ids:
            choice.token_ids, self._token_ids = self._token_ids, []
        return choice

    def whole(self) -> CompletionChoice:
        form = self._form
        output, prompt_logprobs = self._output, self._generation.output.prompt_logprobs
        return CompletionChoice(
            index=self._index,
            text=form.echo_text(self._position) + output.text,
            logprobs=self._all_logprobs(),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            prompt_logprobs=prompt_logprobs if form.wants_prompt_logprobs and prompt_logprobs is not None else UNSET,
            token_ids=output.token_ids if form.wants_token_ids else UNSET,
            prompt_token_ids=self._prompt_token_ids(),
        )

    @property
    def _output(self) -> CompletionOutput:
        return self._generation.output.outputs[self._place]

    def _all_logprobs(self) -> CompletionLogprobs | None:
        if self._form.num_logprobs is None:
            return None
        own = self._logprobs.take()
        echoed = self._form.echo_logprobs(self._position, self._generation)
        if echoed is None:
            return own
        return CompletionLogprobs(
            tokens=echoed.tokens + own.tokens,
            token_logprobs=echoed.token_logprobs + own.token_logprobs,
            top_logprobs=echoed.top_logprobs + own.top_logprobs,
            text_offset=echoed.text_offset + own.text_offset,
        )

    def _prompt_token_ids(self) -> list[int] | UnsetType:
        return self._generation.output.prompt_token_ids if self._form.wants_token_ids else UNSET
