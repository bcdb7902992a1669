"""The fields of a request that say how to sample and how to serve, which are the same for every route.

Names are those of SamplingParams, which are vLLM's; llama.cpp's names of the same things are accepted too, but not
beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from pagewick.engine.messages import RequestOptions
from pagewick.errors import InvalidRequestError
from pagewick.sampling_params import MAX_LOGIT_BIASES, SamplingParams, with_changes
from pagewick.server.api.limits import check_stop

# A string, several, or one of these in the form of the Rust servers: {"Single": "x"}, {"Multiple": ["x"]}.
StopField = str | list[str] | dict[str, str | list[str]]
# OpenAI's map from token ids, or llama.cpp's pairs of a token id or a text and its bias; false bans.
LogitBiasField = dict[str, float] | list[tuple[int | str, float | bool]]

LOWEST_BIAS = -100.0


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
    stop: StopField | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
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
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None

    def bias_texts(self) -> list[str]:
        """The texts that logit_bias names instead of tokens. Raises InvalidRequestError if there are too many pairs."""
        if not isinstance(self.logit_bias, list):
            return []
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            message = f"logit_bias must have at most {MAX_LOGIT_BIASES} entries; got {len(self.logit_bias)}"
            raise InvalidRequestError(message, param="logit_bias")
        return [key for key, _ in self.logit_bias if isinstance(key, str)]

    def with_sampling_fields(
        self, defaults: SamplingParams, spelled: Mapping[str, Sequence[int]], **more: Any
    ) -> SamplingParams:
        """The defaults with what is set here and in `more`. spelled: the tokens of each of `bias_texts`.

        Raises InvalidRequestError for a value out of range.
        """
        given = {name: getattr(self, name) for name in SamplingFields.__struct_fields__}
        given["stop"] = stop_strings(self.stop)
        given["logit_bias"] = _biases(self.logit_bias, spelled)
        given["repetition_penalty"] = one_of(
            repetition_penalty=self.repetition_penalty, repeat_penalty=given.pop("repeat_penalty")
        )
        return with_changes(defaults, {name: value for name, value in (given | more).items() if value is not None})


class ServingFields(SamplingFields, kw_only=True):
    """Also fields of RequestOptions, under vLLM's names as far as it has them. timeout is in seconds.

    priority: here not below 0, so that no client can push itself before all others.
    cache_prompt: llama.cpp's; false lets the prompt share no cached prefix.
    """

    priority: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    timeout: float | None = None
    cache_prompt: bool | None = None

    def options(self) -> RequestOptions:
        """Raises InvalidRequestError for a priority below 0; what else is wrong is found with the request."""
        if self.priority is not None and self.priority < 0:
            message = (
                f"priority must be 0 or more over HTTP, where 0 is the most urgent and higher numbers give way; "
                f"got {self.priority}"
            )
            raise InvalidRequestError(message, param="priority")
        return RequestOptions(
            priority=self.priority or 0,
            cache_salt=self.cache_salt,
            session_id=self.session_id,
            timeout_s=self.timeout,
        )


def one_of(**names: Any) -> Any:
    """The value of the one name that is given; None if none is. Raises InvalidRequestError if several are."""
    given = [name for name, value in names.items() if value is not None]
    if len(given) > 1:
        first, other = given[0], given[-1]
        raise InvalidRequestError(f"{other} is another name of {first}; give one of them", param=other)
    return names[given[0]] if given else None


def stop_strings(stop: StopField | None) -> list[str] | None:
    """Raises InvalidRequestError for a string that is too long, or another form; SamplingParams checks the rest."""
    if isinstance(stop, dict):
        stop = _tagged_stop(stop)
    strings = [stop] if isinstance(stop, str) else stop
    check_stop(strings or [])
    return strings


def _tagged_stop(stop: dict[str, str | list[str]]) -> str | list[str]:
    match stop:
        case {"Single": str(single)} if len(stop) == 1:
            return single
        case {"Multiple": list(several)} if len(stop) == 1:
            return several
    message = 'stop must be a string, a list of strings, {"Single": string} or {"Multiple": [strings]}'
    raise InvalidRequestError(message, param="stop")


def _biases(
    given: LogitBiasField | None, spelled: Mapping[str, Sequence[int]]
) -> Mapping[str, float] | Mapping[int, float] | None:
    """Of llama.cpp's pairs a map; biases of a token that several pairs name add up, as they do there."""
    if not isinstance(given, list):
        return given
    biases: dict[int, float] = {}
    banned: set[int] = set()
    for key, bias in given:
        if bias is True:
            raise InvalidRequestError("a bias must be a number, or false to ban the token", param="logit_bias")
        for token_id in spelled[key] if isinstance(key, str) else [key]:
            biases[token_id] = biases.get(token_id, 0.0) + bias
            if bias is False:
                banned.add(token_id)
    return biases | dict.fromkeys(banned, LOWEST_BIAS)
