"""The bodies of responses of llama.cpp's API."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from pagewick.server.api.responses import Timings


class TokenProbability(Struct, kw_only=True):
    """A token that was or could have been sampled."""

    token: str
    bytes: list[int]
    logprob: float


class SampledToken(TokenProbability, kw_only=True):
    top_logprobs: list[TokenProbability]


class LlamaPiece(Struct, kw_only=True):
    """An event of a stream. index: number of the response, if there are several."""

    index: int
    content: str
    tokens: list[int]
    stop: bool = False
    id_slot: int = -1
    tokens_predicted: int
    tokens_evaluated: int
    timings: Timings | UnsetType = UNSET
    completion_probabilities: list[SampledToken] | UnsetType = UNSET


class LlamaCompletion(LlamaPiece, kw_only=True):
    """A whole response, or the last event of a stream, whose content is empty then.

    prompt: as the model has read it. tokens_cached: its tokens that the cache had. tokens_evaluated: all of its tokens.
    truncated: whether the context was full. generation_settings: the request's settings.
    """

    stop: bool = True
    model: str
    prompt: str
    generation_settings: dict[str, Any]
    has_new_line: bool
    truncated: bool
    stop_type: str
    stopping_word: str
    tokens_cached: int


class Modalities(Struct, kw_only=True):
    vision: bool
    audio: bool = False


class Properties(Struct, kw_only=True):
    """total_slots: sequences that run at the same time. chat_template: its source; empty if there is none."""

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    modalities: Modalities
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool = False


class Slot(Struct, kw_only=True):
    """One of the places for running sequences; which request has which is not known."""

    id: int
    n_ctx: int
    is_processing: bool
