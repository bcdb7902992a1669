"""Responses of the OpenAI API. Field names are OpenAI's, further ones vLLM's."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, Struct, UnsetType

from pagewick.outputs import Logprob

# vLLM's: per prompt token a map from token id to its log-probability, rank and text; null for the first token.
PromptLogprobs = list[dict[int, Logprob] | None]


class PromptTokensDetails(Struct):
    """prefix_miss_position is ours: the prompt's first token that the prefix cache did not know, of a single prompt."""

    cached_tokens: int
    prefix_miss_position: int | UnsetType = UNSET


class CompletionTokensDetails(Struct):
    """What the API calls predictions are speculation's guesses here."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int = 0


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Struct):
    content: list[ContentLogprob]
    refusal: None = None


class AnswerMessage(Struct):
    role: str
    content: str | None
    refusal: None = None


class ChatChoice(Struct):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatDelta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletionChunk(Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: Sequence[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """A completion, and a chunk of one: they have the same shape."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: Sequence[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(Struct, kw_only=True):
    """A served model; max_model_len is vLLM's addition."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "pagewick"
    root: str
    max_model_len: int


class ModelList(Struct):
    data: list[ModelCard]
    object: str = "list"
