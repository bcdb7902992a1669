"""Text completions: Generations as a response, or as the chunks of one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec import UNSET, UnsetType

from pagewick.generation import Generation, Listener, interleave
from pagewick.outputs import CompletionOutput
from pagewick.server.api.framing import Following
from pagewick.server.api.json_response import encoded
from pagewick.server.api.logprobs import ChoiceLogprobs, EchoedPrompt
from pagewick.server.api.responses import Completion, CompletionChoice, CompletionLogprobs
from pagewick.server.api.usage import UsageReport
from pagewick.text.output_stream import ChoiceDelta
from pagewick.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CompletionForm:
    """The parts of a response, with n choices per prompt, that the client wants. echoes: one per prompt, or none."""

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
class CompletionResponse:
    """The response to a request, at once or in chunks. head: the first fields of the response and of each chunk."""

    generations: Sequence[Generation]
    form: CompletionForm
    report: UsageReport
    head: dict[str, Any]

    async def whole(self) -> Completion:
        """Run the requests to their end. Each choice is encoded by itself, since together they may be large."""
        form = self.form
        choices = form.choices(self.generations)
        if len(self.generations) == 1:
            async with self.generations[0] as generation:
                await generation.pass_to(Listener(lambda delta: choices[delta.index].add(delta)))
        else:
            async with aclosing(interleave(self.generations)) as deltas:
                async for position, delta in deltas:
                    choices[position * form.n + delta.index].add(delta)
        written = []
        for choice in choices:
            await choice.prompt.compute_logprobs()
            written.append(await encoded(choice.whole, is_large=form.num_logprobs is not None))
        return Completion(**self.head, choices=written, **self.report.for_response())

    async def chunks(self) -> AsyncGenerator[Following | Completion]:
        """Yield the text of each choice, its last piece with the finish reason; then the usage if it is wanted."""
        chunks = _Chunks(self)
        if len(self.generations) == 1 and not self.form.echoes:
            async with self.generations[0] as generation:
                yield Following(generation, partial(chunks.of, 0), self.text_chunk if self.is_plain else None)
        else:
            async with aclosing(interleave(self.generations)) as deltas:
                async for position, delta in deltas:
                    await chunks.prepare(position, delta)
                    for chunk in chunks.of(position, delta):
                        yield chunk
        if (last := self.report.for_last_chunk()) is not None:
            yield self.chunk([], last)

    @property
    def is_plain(self) -> bool:
        """Whether chunks with text have nothing else that changes."""
        form = self.form
        return self.report.is_same_for_chunks and form.num_logprobs is None and not form.wants_token_ids

    def text_chunk(self, index: int, text: str) -> Completion:
        return self.chunk([CompletionChoice(index, text)], self.report.for_chunk())

    def chunk(self, choices: list[CompletionChoice], more: dict[str, Any]) -> Completion:
        return Completion(**self.head, choices=choices, **more)


class _Chunks:
    """Makes the chunks of deltas."""

    def __init__(self, response: CompletionResponse) -> None:
        self._response = response
        self._form = form = response.form
        self._choices = form.choices(response.generations)
        self._unopened = set(range(len(response.generations)))

    async def prepare(self, position: int, delta: ChoiceDelta) -> None:
        """Compute what `of` needs for this delta, beside the event loop if that takes long."""
        if self._is_opening(position, delta):
            await self._choices[position * self._form.n].prompt.compute_logprobs()

    def of(self, position: int, delta: ChoiceDelta) -> list[Completion]:
        """Return the chunks of a delta. position: the index of its prompt."""
        report = self._response.report
        chunks: list[Completion] = []
        if self._is_opening(position, delta):
            self._unopened.remove(position)
            if self._form.echoes or self._form.wants_token_ids:
                own = self._choices[position * self._form.n : (position + 1) * self._form.n]
                chunks += [self._response.chunk([choice.opening()], report.for_chunk()) for choice in own]
        choice = self._choices[position * self._form.n + delta.index]
        choice.add(delta)
        if delta.text or delta.finish_reason is not None:
            chunks.append(self._response.chunk([choice.next(delta)], report.for_chunk()))
        return chunks

    def _is_opening(self, position: int, delta: ChoiceDelta) -> bool:
        """Whether this delta is the first with a token; then all of the prompt has been computed."""
        return position in self._unopened and bool(delta.token_ids or delta.finish_reason is not None)


class _Prompt:
    """A prompt, which all its choices share. logprobs: an echoed prompt's, once they are computed."""

    def __init__(self, form: CompletionForm, position: int, generation: Generation) -> None:
        self.position = position
        self.output = generation.output
        self.text = form.echoes[position].text if form.echoes else ""
        self._form = form
        self.logprobs: CompletionLogprobs | None = None

    async def compute_logprobs(self) -> None:
        """Compute the log-probabilities of an echoed prompt if they are wanted, once and beside the event loop."""
        form, known = self._form, self.output.prompt_logprobs or []
        if self.logprobs is None and form.num_logprobs is not None and form.echoes:
            make = form.echoes[self.position].logprobs
            self.logprobs = await asyncio.to_thread(make, form.tokenizer, known, form.num_logprobs)


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
        # A client that scores an echoed prompt drops one position at the end per generated token, so the token that
        # ended the text needs a position, too.
        known = self._output.logprobs
        if self._form.echoes and known and len(delta.logprobs or []) < len(delta.token_ids):
            self._logprobs.add_end(known[-1])

    def opening(self) -> CompletionChoice:
        """Return the prompt, as text or as tokens, for a stream to begin with."""
        prompt = self.prompt
        return CompletionChoice(self._index, prompt.text, prompt.logprobs, prompt_token_ids=self._prompt_token_ids())

    def next(self, delta: ChoiceDelta) -> CompletionChoice:
        """Return everything that has been added since the last call; delta is the latest."""
        logprobs = None if self._form.num_logprobs is None else self._logprobs.take()
        choice = CompletionChoice(self._index, delta.text, logprobs, delta.finish_reason, delta.stop_reason)
        if self._form.wants_token_ids:
            choice.token_ids, self._token_ids = self._token_ids, []
        return choice

    def whole(self) -> CompletionChoice:
        form = self._form
        output, prompt_logprobs = self._output, self.prompt.output.prompt_logprobs
        return CompletionChoice(
            index=self._index,
            text=self.prompt.text + output.text,
            logprobs=None if form.num_logprobs is None else self._logprobs.take(after=self.prompt.logprobs),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            prompt_logprobs=prompt_logprobs if form.wants_prompt_logprobs and prompt_logprobs is not None else UNSET,
            token_ids=output.token_ids if form.wants_token_ids else UNSET,
            prompt_token_ids=self._prompt_token_ids(),
        )

    @property
    def _output(self) -> CompletionOutput:
        return self.prompt.output.outputs[self._place]

    def _prompt_token_ids(self) -> list[int] | UnsetType:
        return self.prompt.output.prompt_token_ids if self._form.wants_token_ids else UNSET
