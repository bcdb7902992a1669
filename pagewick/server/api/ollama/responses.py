"""The bodies that Ollama's API sends. Field names are Ollama's; times are in nanoseconds."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal

from msgspec import UNSET, Raw, Struct, UnsetType


def timestamp(moment: datetime) -> str:
    """Return a time of UTC in the form of RFC 3339."""
    return moment.isoformat().replace("+00:00", "Z")


class OllamaError(Struct):
    """error: the cause and the fix."""

    error: str


class OllamaFunction(Struct):
    """arguments: those of a call that num_predict has cut off lack the last one."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(Struct):
    id: str
    function: OllamaFunction


class OllamaAnswer(Struct):
    """thinking: the model's thoughts."""

    role: str
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class TokenAlternative(Struct):
    token: str
    logprob: float
    bytes: list[int]


class GeneratedToken(TokenAlternative):
    top_logprobs: list[TokenAlternative]


class LastFields(Struct, kw_only=True):
    """Fields that only the last object of a response has.

    done_reason: load: only the model was asked for; unload: it has been unloaded. total_duration: from the request to
    the last token. load_duration: 0, since the model was loaded before. prompt_eval_count: tokens of the prompt, those
    of the prefix cache included. prompt_eval_duration: until the first token. eval_count: tokens of the response.
    eval_duration: from the first token to the last.
    """

    done_reason: Literal["stop", "length", "load", "unload"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaChat(LastFields, kw_only=True):
    """A response to a chat, or a piece of one."""

    model: str
    created_at: str
    message: OllamaAnswer
    logprobs: list[GeneratedToken] | UnsetType = UNSET
    done: bool


class OllamaText(LastFields, kw_only=True):
    """A response to a prompt, or a piece of one."""

    model: str
    created_at: str
    response: str
    thinking: str | UnsetType = UNSET
    logprobs: list[GeneratedToken] | UnsetType = UNSET
    done: bool


class OllamaEmbeddings(Struct, kw_only=True):
    model: str
    embeddings: Sequence[Raw]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(Struct):
    embedding: Raw


class PullStatus(Struct):
    """status: success: the model is served."""

    status: str


class OllamaVersion(Struct):
    """version: that of Ollama whose API this is, as far as docs/ollama.md says."""

    version: str


class ModelDetails(Struct, kw_only=True):
    """format: gguf or safetensors. family: the architecture. parameter_size: such as 8.0B.

    Texts are empty, and families null, for what is not known before a model is loaded.
    """

    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: list[str] | None = None
    parameter_size: str = ""
    quantization_level: str = ""


class ListedModel(Struct, kw_only=True):
    """size: bytes of its files. digest: differs between models; it is no hash of their content."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class ModelTags(Struct):
    models: list[ListedModel]


class RunningModel(Struct, kw_only=True):
    """size: bytes of its files, about those of its weights in memory. size_vram: those on a GPU.

    expires_at: when it is unloaded if nobody uses it; far away if it stays.
    """

    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: str
    size_vram: int
    context_length: int


class RunningModels(Struct):
    models: list[RunningModel]


class ModelDescription(Struct, kw_only=True):
    """parameters: the defaults of sampling, one in each line. template: the chat template, in Jinja.

    capabilities: completion, tools, thinking, vision, insert, embedding; missing while the model is not loaded.
    """

    modelfile: str = ""
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str] | UnsetType = UNSET
    modified_at: str
