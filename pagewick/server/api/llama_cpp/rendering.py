"""Generations as responses of llama.cpp's API, at once or as events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET

from pagewick.generation import Generation, interleave
from pagewick.outputs import CompletionOutput
from pagewick.sampling_params import SamplingParams
from pagewick.server.api.llama_cpp.fields import selected
from pagewick.server.api.llama_cpp.responses import LlamaCompletion, LlamaPiece, SampledToken, TokenProbability
from pagewick.server.api.usage import timings_of
from pagewick.text.output_stream import ChoiceDelta, PositionLogprobs, TokenChoice

# llama.cpp's names of settings, each with the field of SamplingParams that has its value.
_SETTINGS = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "typical_p": "typical_p",
    "top_n_sigma": "top_n_sigma", "xtc_probability": "xtc_probability", "xtc_threshold": "xtc_threshold",
    "repeat_penalty": "repetition_penalty", "repeat_last_n": "repeat_last_n", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "dry_multiplier": "dry_multiplier", "dry_base": "dry_base",
    "dry_allowed_length": "dry_allowed_length", "dry_penalty_last_n": "dry_penalty_last_n", "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau", "mirostat_eta": "mirostat_eta", "ignore_eos": "ignore_eos", "stop": "stop",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LlamaForm:
    """How a response is written. decode: from token ids to the text of a prompt.

    max_model_len: the context. is_list: a list of responses, also of one.
    """

    model: str
    decode: Callable[[list[int]], str]
    max_model_len: int
    is_list: bool = False
    wants_tokens: bool = False
    wants_probabilities: bool = False
    wants_timings: bool = False
    response_fields: list[str] | None = None


@dataclass(frozen=True, slots=True)
class LlamaResponse:
    """The response to a request."""

    generations: Sequence[Generation]
    form: LlamaForm

    async def whole(self) -> Any:
        """Run the requests to their end; return one response, or a list of them."""
        choices = self._choices()
        async with aclosing(interleave(self.generations)) as deltas:
            async for position, delta in deltas:
                choices[position][delta.index].add(delta)
        found = [choice.whole(is_last_event=False) for own in choices for choice in own]
        return found if self.form.is_list else found[0]

    async def chunks(self) -> AsyncGenerator[Any]:
        """Yield an event for each piece of text, and a last one for each response."""
        choices = self._choices()
        async with aclosing(interleave(self.generations)) as deltas:
            async for position, delta in deltas:
                choice = choices[position][delta.index]
                choice.add(delta)
                if delta.text or delta.token_ids:
                    yield choice.piece(delta)
                if delta.finish_reason is not None:
                    yield choice.whole(is_last_event=True)

    def _choices(self) -> list[list[_Choice]]:
        found, index = [], 0
        for generation in self.generations:
            number = generation.params.n
            found.append([_Choice(self.form, generation, place, index + place) for place in range(number)])
            index += number
        return found


@dataclass(slots=True)
class _Choice:
    """One response, as it grows. place: its choice of the request. index: its number among all."""

    form: LlamaForm
    generation: Generation
    place: int
    index: int
    probabilities: list[SampledToken] = field(default_factory=list)
    new_probabilities: list[SampledToken] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, delta: ChoiceDelta) -> None:
        self.num_tokens += len(delta.token_ids)
        self.new_probabilities = [_sampled(one) for one in delta.logprobs or []]
        self.probabilities += self.new_probabilities

    def piece(self, delta: ChoiceDelta) -> LlamaPiece:
        form = self.form
        return LlamaPiece(
            index=self.index,
            content=delta.text,
            tokens=delta.token_ids,
            tokens_predicted=self.num_tokens,
            tokens_evaluated=len(self.generation.output.prompt_token_ids),
            timings=timings_of([self.generation]) if form.wants_timings else UNSET,
            completion_probabilities=self.new_probabilities if form.wants_probabilities else UNSET,
        )

    def whole(self, *, is_last_event: bool) -> Any:
        """Return the response; as the last event of a stream, which has no text."""
        form, output = self.form, self.generation.output
        choice = output.outputs[self.place]
        num_prompt_tokens = len(output.prompt_token_ids)
        ends_with_word = isinstance(choice.stop_reason, str)
        made = LlamaCompletion(
            index=self.index,
            content="" if is_last_event else choice.text,
            tokens=choice.token_ids if form.wants_tokens and not is_last_event else [],
            tokens_predicted=self.num_tokens,
            tokens_evaluated=num_prompt_tokens,
            timings=timings_of([self.generation]),
            completion_probabilities=self.probabilities if form.wants_probabilities and not is_last_event else UNSET,
            model=form.model,
            prompt=form.decode(output.prompt_token_ids),
            generation_settings=settings_of(self.generation.params, form.max_model_len),
            has_new_line="\n" in choice.text,
            truncated=choice.finish_reason == "length" and num_prompt_tokens + self.num_tokens >= form.max_model_len,
            stop_type=_stop_type(choice),
            stopping_word=str(choice.stop_reason) if ends_with_word else "",
            tokens_cached=output.num_cached_tokens,
        )
        if not form.response_fields:
            return made
        return selected(msgspec.to_builtins(made), form.response_fields)


def settings_of(params: SamplingParams, max_model_len: int) -> dict[str, Any]:
    """Return the settings of a request under llama.cpp's names."""
    found = {name: getattr(params, own) for name, own in _SETTINGS.items()}
    num_tokens = -1 if params.max_tokens is None else params.max_tokens
    return {
        "n_ctx": max_model_len, "n_predict": num_tokens, "max_tokens": num_tokens,
        "seed": -1 if params.seed is None else params.seed, "n_probs": params.logprobs or 0, **found,
    }  # fmt: skip


def _stop_type(choice: CompletionOutput) -> str:
    if choice.finish_reason == "length":
        return "limit"
    return "word" if isinstance(choice.stop_reason, str) else "eos"


def _sampled(position: PositionLogprobs) -> SampledToken:
    one = position.chosen
    return SampledToken(
        token=one.token, bytes=list(one.shown), logprob=one.logprob, top_logprobs=[_token(top) for top in position.top]
    )


def _token(one: TokenChoice) -> TokenProbability:
    return TokenProbability(token=one.token, bytes=list(one.shown), logprob=one.logprob)
