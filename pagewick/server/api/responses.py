"""Responses of the OpenAI API. Field names are OpenAI's, and for further fields vLLM's and llama.cpp's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, Raw, Struct, UnsetType

from pagewick.outputs import Logprob

# vLLM's: per prompt token a map from token id to its log-probability, rank and text; null for the first token.
PromptLogprobs = list[dict[int, Logprob] | None]


class PromptTokensDetails(Struct):
    """prefix_miss_position is ours: position of the first token that the prefix cache did not have, for one prompt."""

    cached_tokens: int
    prefix_miss_position: int | UnsetType = UNSET


class CompletionTokensDetails(Struct):
    """OpenAI's predictions are the draft tokens of speculative decoding here."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int = 0


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Timings(Struct):
    """llama.cpp's: milliseconds and rates of the prompt (without cached tokens) and of the generated tokens."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Struct):
    content: list[ContentLogprob]
    refusal: None = None


class FunctionDelta(Struct):
    """More of a call's arguments, which are JSON. The first delta of a call also has the function's name."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct, kw_only=True):
    """A tool call, or more of one, which has no id and type. Only chunks have an index."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta


class ServerToolCall(Struct):
    """Ours: a call of a tool that the server ran itself. index: among all of the response. round: from 0.

    A stream has it in two pieces: the call when it begins, and its result, with the same index.
    """

    index: int
    round: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    result: str | UnsetType = UNSET
    is_error: bool | UnsetType = UNSET


class ResponseMessage(Struct):
    """The model's thoughts stand under both names that clients read; a message without thoughts has neither.

    function_call: the only call, for clients that know its former form. server_tool_calls: those that the server ran.
    """

    role: str
    content: str | None
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    function_call: FunctionDelta | UnsetType = UNSET
    server_tool_calls: list[ServerToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    """stop_reason is vLLM's: the stop string or token that ended the choice."""

    index: int
    message: ResponseMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class _ResponseHead(Struct, kw_only=True):
    """Fields that all responses, and all chunks of them, begin with."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletion(_ResponseHead, kw_only=True):
    object: str = "chat.completion"
    # Raw: a choice that is encoded as JSON already, here and in Completion.
    choices: Sequence[ChatChoice | Raw]
    usage: Usage
    timings: Timings | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatDelta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    refusal: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    function_call: FunctionDelta | UnsetType = UNSET
    server_tool_calls: list[ServerToolCall] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(_ResponseHead, kw_only=True):
    object: str = "chat.completion.chunk"
    choices: Sequence[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionLogprobs(Struct):
    """The first token of an echoed prompt has no log-probability and no alternatives."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(_ResponseHead, kw_only=True):
    """A completion, or a chunk of one, which has the same shape."""

    object: str = "text_completion"
    choices: Sequence[CompletionChoice | Raw]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET


class ModelPermission(Struct, kw_only=True):
    """For clients that still look for it; its fields are those that OpenAI's API once had."""

    id: str
    object: str = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: None = None
    is_blocking: bool = False


class ModelStatus(Struct, kw_only=True):
    """value: unloaded, loading, loaded or unloading.

    failed: whether the last attempt to load the model failed, or its engine does not work and is being started again.
    """

    value: str
    failed: bool


class ModelCard(Struct, kw_only=True):
    """A served model; root, parent, max_model_len and permission are vLLM's additions.

    parent: of a LoRA adapter, the name of its model. max_model_len, input_modalities: null while it is not loaded.
    input_modalities: what the model reads, text or image; OpenRouter's word.
    status: whether the model is loaded, if the server has several; llama.cpp's.
    """

    id: str
    object: str = "model"
    created: int
    owned_by: str = "pagewick"
    root: str
    parent: str | None = None
    max_model_len: int | None
    input_modalities: list[str] | None
    permission: list[ModelPermission]
    status: ModelStatus | UnsetType = UNSET


class ModelList(Struct):
    data: list[ModelCard]
    object: str = "list"


class TokenPiece(Struct):
    """llama.cpp's: the piece is a list of bytes where it is not valid text by itself."""

    id: int
    piece: str | list[int]


class TokenizeResponse(Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: Sequence[int | TokenPiece]
    token_strs: list[str] | UnsetType = UNSET


class PromptResponse(Struct):
    prompt: str


class VersionResponse(Struct):
    version: str


class DetokenizeResponse(Struct):
    """One text under vLLM's name and llama.cpp's."""

    prompt: str
    content: str


class SessionResponse(Struct, kw_only=True):
    """A recorded conversation."""

    id: str
    object: str = "session"
    messages: list[dict[str, Any]]


class SessionDeleted(Struct, kw_only=True):
    id: str
    object: str = "session.deleted"
    deleted: bool = True
