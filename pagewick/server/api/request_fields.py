"""The fields of a request that say how to sample and how to serve; every route has them.

Names are those of SamplingParams, which are vLLM's. llama.cpp's names for the same things are accepted, too, but only
one name at a time.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from pagewick.errors import InvalidRequestError
from pagewick.server.core.request import Serving

# A string, several, or one of these in the form of the Rust servers: {"Single": "x"}, {"Multiple": ["x"]}.
StopField = str | list[str] | dict[str, str | list[str]]
# OpenAI's map from token ids, or llama.cpp's pairs of a token id or a text and its bias; false bans.
LogitBiasField = dict[str, float] | list[tuple[int | str, float | bool]]


class SamplingFields(Struct, kw_only=True):
    """Fields of SamplingParams under its names.

    repeat_penalty: llama.cpp's name for repetition_penalty.
    dry_base, dry_allowed_length: see dry_multiplier. xtc_threshold: see xtc_probability. mirostat_tau: see mirostat.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    seed: int | None = None
    stop: StopField | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: LogitBiasField | None = None
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

    def sampling(self, **more: Any) -> dict[str, Any]:
        """Return the fields that are set here or in `more`, for TextRequest.sampling. Raises InvalidRequestError."""
        given = {name: getattr(self, name) for name in SamplingFields.__struct_fields__}
        given["stop"] = stop_strings(self.stop)
        given["repetition_penalty"] = one_of(
            repetition_penalty=self.repetition_penalty, repeat_penalty=given.pop("repeat_penalty")
        )
        return {name: value for name, value in (given | more).items() if value is not None}

    def names(self) -> dict[str, str]:
        """Return TextRequest.names."""
        return {} if self.repeat_penalty is None else {"repetition_penalty": "repeat_penalty"}


class ServingFields(SamplingFields, kw_only=True):
    """Also fields of RequestOptions, under vLLM's names where it has them.

    timeout: seconds after which the request ends with status 504, waiting or running.
    priority: 0 or more, so that no client can overtake all others.
    session_id: a number, such as the key of a row in a client's database, counts as its digits.
    cache_prompt: llama.cpp's; with false the prompt shares no cached prefix.
    """

    priority: int | None = None
    cache_salt: str | None = None
    session_id: str | int | None = None
    timeout: float | None = None
    cache_prompt: bool | None = None

    def serving(self) -> Serving:
        session_id = None if self.session_id is None else str(self.session_id)
        return Serving(self.priority, self.cache_salt, session_id, self.timeout, self.cache_prompt is not False)


class ChoiceFields(ServingFields, kw_only=True):
    """Also fields of SamplingParams that only OpenAI's older routes have, whose responses have several choices."""

    n: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None

    def sampling(self, **more: Any) -> dict[str, Any]:
        own = set(ChoiceFields.__struct_fields__) - set(ServingFields.__struct_fields__)
        return super().sampling(**{name: getattr(self, name) for name in own} | more)


def one_of(**names: Any) -> Any:
    """Return the value of the one name that is given; None if none is. Raises InvalidRequestError for several."""
    given = [name for name, value in names.items() if value is not None]
    if len(given) > 1:
        first, other = given[0], given[-1]
        raise InvalidRequestError(f"{other} is another name of {first}; give one of them", param=other)
    return names[given[0]] if given else None


def stop_strings(stop: StopField | None) -> list[str] | None:
    """Raises InvalidRequestError for any form that StopField does not have."""
    match stop:
        case None | list():
            return stop
        case str():
            return [stop]
        case {"Single": str(single)} if len(stop) == 1:
            return [single]
        case {"Multiple": list(several)} if len(stop) == 1:
            return several
    message = 'stop must be a string, a list of strings, {"Single": string} or {"Multiple": [strings]}'
    raise InvalidRequestError(message, param="stop")
