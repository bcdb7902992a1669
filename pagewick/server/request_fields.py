"""The fields of a request that say how to sample and how to serve, which are the same for every route."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from pagewick.engine.messages import RequestOptions
from pagewick.errors import InvalidRequestError
from pagewick.sampling_params import SamplingParams, with_changes
from pagewick.server.limits import check_stop


class SamplingFields(Struct, kw_only=True):
    """Fields of SamplingParams, under its names; repeat_penalty is llama.cpp's name for repetition_penalty."""

    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None

    def with_sampling_fields(self, defaults: SamplingParams, **more: Any) -> SamplingParams:
        """The defaults with what is set here and in `more`. Raises InvalidRequestError for a value out of range."""
        check_stop([self.stop] if isinstance(self.stop, str) else self.stop or [])
        given = {name: getattr(self, name) for name in SamplingFields.__struct_fields__} | more
        repeat_penalty = given.pop("repeat_penalty")
        if repeat_penalty is not None:
            if given["repetition_penalty"] is not None:
                message = "repeat_penalty is another name of repetition_penalty; give one of them"
                raise InvalidRequestError(message, param="repeat_penalty")
            given["repetition_penalty"] = repeat_penalty
        return with_changes(defaults, {name: value for name, value in given.items() if value is not None})


class ServingFields(SamplingFields, kw_only=True):
    """Also fields of RequestOptions, under vLLM's names as far as it has them. timeout is in seconds.

    priority: here not below 0, so that no client can push itself before all others.
    """

    priority: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    timeout: float | None = None

    def options(self, fairness_key: str) -> RequestOptions:
        """Raises InvalidRequestError for a priority below 0; what else is wrong is found with the request."""
        if self.priority is not None and self.priority < 0:
            message = (
                f"priority must be 0 or more over HTTP, where 0 is the most urgent and higher numbers give way; "
                f"got {self.priority}"
            )
            raise InvalidRequestError(message, param="priority")
        return RequestOptions(
            priority=self.priority or 0,
            fairness_key=fairness_key,
            cache_salt=self.cache_salt,
            session_id=self.session_id,
            timeout_s=self.timeout,
        )
