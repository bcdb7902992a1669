"""Text completions: what requests give, as an answer or as chunks of one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec import UNSET, UnsetType

from pagewick.generation import Generation, interleave
from pagewick.outputs import CompletionOutput
from pagewick.server.api.json_answer import encoded
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

    def choices(self, generations: Sequence[Generation]) -> list[_Choice]:
        """Choice i of prompt p has the index p * n + i."""
        prompts = [_Prompt(self, p, generation) for p, generation in enumerate(generations)]
        return [_Choice(self, prompt, i) for prompt in prompts for i in range(self.n)]


@dataclass(frozen=True, slots=True)
class CompletionAnswer:
    """What requests give, at once or in chunks. head: what an answer and each chunk of it begin with."""

    generations: Sequence[Generation]
    form: CompletionForm
    figures: Figures
    head: dict[str, Any]

    async def whole(self) -> Completion:
        """Run the requests to their end. Each choice is JSON: together they may be large."""
        form = self.form
        choices = form.choices(self.generations)
        async with aclosing(interleave(self.generations)) as deltas:
            async for position, delta in deltas:
                self.figures.observe(delta)
                choices[position * form.n + delta.index].add(delta)
        is_large = form.num_logprobs is not None
        written = [
            await encoded(partial(choice.whole, await choice.prompt.logprobs()), is_large=is_large)
            for choice in choices
        ]
        return Completion(**self.head, choices=written, **self.figures.of_answer())

    async def chunks(self) -> AsyncGenerator[Completion]:
        """Text, with the last of it the finish reason, of each choice; then the usage if it is wanted."""
        form, figures = self.form, self.figures
        new_chunk = partial(Completion, **self.head)
        choices = form.choices(self.generations)
        unopened = set(range(len(self.generations)))
        async with aclosing(interleave(self.generations)) as deltas:
            async for position, delta in deltas:
                figures.observe(delta)
                # Before that not all of the prompt has been computed.
                if position in unopened and (delta.token_ids or delta.finish_reason is not None):
                    unopened.remove(position)
                    for choice in choices[position * form.n : (position + 1) * form.n]:
                        if form.echoes or form.wants_token_ids:
                            opening = choice.opening(await choice.prompt.logprobs())
                            yield new_chunk(choices=[opening], **figures.of_chunk())
                choice = choices[position * form.n + delta.index]
                choice.add(delta)
                if delta.text or delta.finish_reason is not None:
                    yield new_chunk(choices=[choice.next(delta)], **figures.of_chunk())
        if (last := figures.of_last_chunk()) is not None:
            yield new_chunk(choices=[], **last)


class _Prompt:
    """What all choices of a prompt say of it."""

    def __init__(self, form: CompletionForm, position: int, generation: Generation) -> None:
        self.position = position
        self.output = generation.output
        self.text = form.echoes[position].text if form.echoes else ""
        self._form = form
        self._logprobs: CompletionLogprobs | None = None

    async def logprobs(self) -> CompletionLogprobs | None:
        """If they are wanted; they must be known by now. Made once and beside the event loop: they may be many."""
        form, known = self._form, self.output.prompt_logprobs or []
        if self._logprobs is None and form.num_logprobs is not None and form.echoes:
            make = form.echoes[self.position].logprobs
            self._logprobs = await asyncio.to_thread(make, form.tokenizer, known, form.num_logprobs)
        return self._logprobs


class _Choice:
    """One choice of one prompt, as it grows."""

    def __init__(self, form: CompletionForm, prompt: _Prompt, place: int) -> None:
        self.prompt = prompt
        self._form = form
        self._place = place
        self._index = prompt.position * form.n + place
        self._token_ids: list[int] = []
        self._logprobs = ChoiceLogprobs(len(prompt.text))

    def add(self, delta: ChoiceDelta) -> None:
        self._logprobs.add(delta.logprobs or [])
        self._token_ids += delta.token_ids
        # Who scores a prompt that is echoed leaves out as many positions at its end as were generated, the token that
        # ended the text among them.
        known = self._output.logprobs
        if self._form.echoes and known and len(delta.logprobs or []) < len(delta.token_ids):
            self._logprobs.add_end(known[-1])

    def opening(self, echoed: CompletionLogprobs | None) -> CompletionChoice:
        """What a stream says before the first token: the prompt, as text or as tokens; echoed are its logprobs."""
        choice = CompletionChoice(self._index, self.prompt.text, echoed)
        choice.prompt_token_ids = self._prompt_token_ids()
        return choice

    def next(self, delta: ChoiceDelta) -> CompletionChoice:
        """What has been added since the last time, the delta last."""
        logprobs = None if self._form.num_logprobs is None else self._logprobs.take()
        choice = CompletionChoice(self._index, delta.text, logprobs, delta.finish_reason, delta.stop_reason)
        if self._form.wants_token_ids:
            choice.token_ids, self._token_ids = self._token_ids, []
        return choice

    def whole(self, echoed: CompletionLogprobs | None) -> CompletionChoice:
        form = self._form
        output, prompt_logprobs = self._output, self.prompt.output.prompt_logprobs
        return CompletionChoice(
            index=self._index,
            text=self.prompt.text + output.text,
            logprobs=self._all_logprobs(echoed),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            prompt_logprobs=prompt_logprobs if form.wants_prompt_logprobs and prompt_logprobs is not None else UNSET,
            token_ids=output.token_ids if form.wants_token_ids else UNSET,
            prompt_token_ids=self._prompt_token_ids(),
        )

    @property
    def _output(self) -> CompletionOutput:
        return self.prompt.output.outputs[self._place]

    def _all_logprobs(self, echoed: CompletionLogprobs | None) -> CompletionLogprobs | None:
        if self._form.num_logprobs is None:
            return None
        own = self._logprobs.take()
        if echoed is None:
            return own
        return CompletionLogprobs(
            tokens=echoed.tokens + own.tokens,
            token_logprobs=echoed.token_logprobs + own.token_logprobs,
            top_logprobs=echoed.top_logprobs + own.top_logprobs,
            text_offset=echoed.text_offset + own.text_offset,
        )

    def _prompt_token_ids(self) -> list[int] | UnsetType:
        return self.prompt.output.prompt_token_ids if self._form.wants_token_ids else UNSET
