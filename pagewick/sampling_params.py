"""SamplingParams: what a user may ask of the sampler. It checks itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagewick.errors import InvalidRequestError, ModelLoadError

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
SEED_LIMIT = 2**63


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when generation ends. Names and meanings are vLLM's.

    n: choices per prompt, each an independent sample.
    max_tokens: at most so many new tokens; None: until the context is full.
    temperature: 0 is greedy; otherwise logits are divided by it.
    top_k: keep the k most likely tokens; 0 or -1 keeps all.
    top_p: keep the smallest set of most likely tokens whose mass reaches top_p.
    seed: makes the sample repeatable whatever else is in the batch; None draws one.
    stop: strings that end the text; they are not part of it.
    stop_token_ids: tokens that end the output.
    ignore_eos: go on after the model's end-of-sequence token.
    min_tokens: no end-of-sequence or stop token before so many tokens.
    logprobs: report the log-probability of each output token and of this many alternatives.
    prompt_logprobs: the same for the prompt's tokens.
    skip_special_tokens: leave special tokens out of the text.

    Raises InvalidRequestError if a value is out of range.
    """

    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _sequence("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _sequence("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "top_k", max(_integer("top_k", self.top_k, -1, 2**31), 0))
        _integer("n", self.n, 1, MAX_CHOICES)
        _number("temperature", self.temperature, 0.0, 2.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise InvalidRequestError("top_p must be above 0 and at most 1; got 0", param="top_p")
        for name, high in (("max_tokens", 2**31), ("logprobs", MAX_LOGPROBS), ("prompt_logprobs", MAX_LOGPROBS)):
            value = getattr(self, name)
            if value is not None:
                _integer(name, value, 1 if name == "max_tokens" else 0, high)
        _integer("min_tokens", self.min_tokens, 0, 2**31)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) must not be above max_tokens ({self.max_tokens})", param="min_tokens"
            )
        if self.seed is not None:
            _integer("seed", self.seed, -SEED_LIMIT, SEED_LIMIT - 1)
        if len(stop) > MAX_STOP_STRINGS or not all(isinstance(text, str) and text for text in stop):
            raise InvalidRequestError(
                f"stop must be at most {MAX_STOP_STRINGS} strings, none of them empty", param="stop"
            )
        for token_id in self.stop_token_ids:
            _integer("stop_token_ids", token_id, 0, 2**31)


def default_sampling_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """The temperature, top_p and top_k that generation_config.json recommends. Raises ModelLoadError for wrong ones."""
    names = [name for name in ("temperature", "top_p", "top_k") if generation_config.get(name) is not None]
    try:
        return SamplingParams(**{name: generation_config[name] for name in names})
    except InvalidRequestError as error:
        raise ModelLoadError(f"the model's generation_config.json is wrong: {error}") from error


def _sequence(name: str, value: object) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple | set | frozenset):
        raise InvalidRequestError(f"{name} must be a list; got {value!r}", param=name)
    return tuple(value)


def _integer(name: str, value: object, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be an integer from {low} to {high}; got {value!r}", param=name)
    return value


def _number(name: str, value: object, low: float, high: float) -> None:
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not math.isfinite(value)
        or not low <= value <= high
    ):
        raise InvalidRequestError(f"{name} must be a number from {low:g} to {high:g}; got {value!r}", param=name)
