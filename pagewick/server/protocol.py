"""Requests of the OpenAI API, as far as they are supported, and how a body becomes a request.

Field names are OpenAI's, further ones vLLM's. Every optional field may be null, which is the same as leaving it out.
A field is in one of four places: in the request's struct; in UNSUPPORTED, known but refused unless its value asks for
nothing; in HARMLESS, bookkeeping that changes no answer; or nowhere: then it is ignored, and the response says so.
"""

from __future__ import annotations

import re
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from pagewick.errors import InvalidRequestError, UnsupportedError
from pagewick.sampling_params import SamplingParams
from pagewick.server.limits import MAX_MESSAGES, MAX_SEQUENCES, check_count, check_nesting
from pagewick.server.request_fields import ServingFields

DEFAULT_COMPLETION_TOKENS = 16

# Known fields that are not supported yet, each with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "guided_json": (),
    "guided_regex": ("",),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "modalities": (["text"],),
    "prediction": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "web_search_options": (),
}
HARMLESS = frozenset({
    "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "request_id",
    "safety_identifier", "service_tier", "store", "user",
})  # fmt: skip


class StreamOptions(Struct):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(ServingFields, kw_only=True):
    """What chat and completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def __post_init__(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream: true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatMessage(Struct, omit_defaults=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("messages", len(self.messages), MAX_MESSAGES)
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")

    def plain_messages(self) -> list[dict[str, Any]]:
        return [msgspec.to_builtins(message) for message in self.messages]

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """Raises InvalidRequestError for a value out of range. Without max_tokens the context is the limit."""
        try:
            return self.with_sampling_fields(
                defaults,
                max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
                logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            )
        except InvalidRequestError as error:
            if error.param == "logprobs":
                raise InvalidRequestError(f"top_{error}", param="top_logprobs") from None
            raise


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    best_of: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stream and (self.best_of or 1) > (self.n or 1):
            raise InvalidRequestError("best_of cannot be streamed when it is above n", param="best_of")

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        token_ids = [item for item in given if isinstance(item, int)]
        prompts = [item for item in given if not isinstance(item, int)]
        if len({type(item) for item in given}) > 1:
            raise InvalidRequestError("prompt must not mix texts and token ids", param="prompt")
        if not prompts:
            return [token_ids]
        check_count("prompt", len(prompts) * max(self.n or 1, self.best_of or 1), MAX_SEQUENCES)
        return prompts

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """Raises InvalidRequestError for a value out of range."""
        max_tokens = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return self.with_sampling_fields(defaults, max_tokens=max_tokens, logprobs=self.logprobs, best_of=self.best_of)


_Request = TypeVar("_Request", bound=GenerationRequest)


def decode_request(body: bytes, kind: type[_Request]) -> tuple[_Request, list[str]]:
    """The request in a body, and the names of the fields that are ignored.

    Raises InvalidRequestError, with the field's name if it is one field's fault.
    """
    check_nesting(body)
    try:
        values = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        _refuse_unsupported(values, kind)
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _field_error(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    known = {*kind.__struct_fields__, *UNSUPPORTED, *HARMLESS}
    return request, [name for name in values if name not in known]


def _refuse_unsupported(values: dict[str, msgspec.Raw], kind: type[GenerationRequest]) -> None:
    """best_of, for one, is a field of one route only."""
    for name in (UNSUPPORTED.keys() & values.keys()) - set(kind.__struct_fields__):
        value = msgspec.json.decode(values[name])
        if value is not None and value not in UNSUPPORTED[name]:
            raise UnsupportedError(f"{name} is not supported yet; leave it out", param=name)


def _field_error(error: msgspec.ValidationError) -> InvalidRequestError:
    """msgspec says "Expected `int`, got `str` - at `$.max_tokens`"; `$.` is the body."""
    reason, _, path = str(error).partition(" - at `$")
    names = [path.rstrip("`").lstrip(".")]
    if match := re.search(r"missing required field `(\w+)`", reason):
        names.append(match[1])
    param = ".".join(name for name in names if name)
    message = f"{param}: {reason}" if param else f"the body is not a request: {reason}"
    return InvalidRequestError(message, param=param or None)
