"""Known fields that do nothing: those that are refused, and those that change no response."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pagewick.errors import InvalidRequestError, UnsupportedError
from pagewick.server.api.messages import ChatMessage
from pagewick.server.api.nested_fields import Nested

# Reason for a refusal -> its fields, each with the values that ask for nothing.
_NEEDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "needs a model that speaks or draws; this one writes text": {
        "audio": (),
        "modalities": (["text"],),
    },
    "is not supported: send each image as an image_url part of a message to /v1/chat/completions": {
        "image_data": ([],),
    },
    "is not supported: the model's own settings decide how images are read, and --max-image-pixels limits them": {
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
    },
    "is not supported: truncate_prompt_tokens limits the tokens of a document's prompt": {
        "max_tokens_per_doc": (0,),
        "max_chunks_per_doc": (),
    },
    "is not supported: name the LoRA adapter as the model; GET /v1/models lists them": {"lora": ([],)},
    "is not a field of this route": {
        "add_generation_prompt": (True,),
        "best_of": (1,),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "documents": ([],),
        "enable_thinking": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "include_reasoning": (True,),
        "max_completion_tokens": (),
        "parallel_tool_calls": (True,),
        "reasoning_budget": (-1,),
        "reasoning_effort": ("none",),
        "reasoning_format": ("none", "auto"),
        "record_conversation": (False,),
        "suffix": ("",),
        "thinking": (False,),
        "thinking_budget": (-1,),
        "thinking_token_budget": (-1,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "top_logprobs": (0,),
    },
    "is not a field of this route: send it to /v1/embeddings or /v1/responses": {"input": ()},
    "is not a field of this route: send it to /v1/chat/completions": {"messages": ()},
    "is not a field of this route: send it to /v1/completions": {"prompt": ()},
    "is not supported here": {
        # OpenAI's.
        "moderation": (),
        "prediction": (),
        "verbosity": ("medium",),
        "web_search_options": (),
        # vLLM's.
        "kv_transfer_params": ({},),
        "logits_processors": ([],),
        "prompt_embeds": ([],),
        "return_tokens_as_token_ids": (False,),
        "spaces_between_special_tokens": (True,),
        # llama.cpp's.
        "grammar_lazy": (False,),
        "grammar_triggers": ([],),
        "preserved_tokens": ([],),
        "dynatemp_exponent": (1,),
        "dynatemp_range": (0,),
        "min_keep": (0,),
        "n_discard": (0,),
        "n_indent": (0,),
        "n_keep": (0, -1),
        "post_sampling_probs": (False,),
        "return_progress": (False,),
        "samplers": ([],),
        "t_max_predict_ms": (0, -1),
    },
}
UNSUPPORTED = {name: nothing for fields in _NEEDS.values() for name, nothing in fields.items()}
_REASONS = {name: reason for reason, fields in _NEEDS.items() for name in fields}
HARMLESS = frozenset({
    "cache_control", "guided_decoding_backend", "id_slot", "metadata", "parse_tool_calls", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user",
})  # fmt: skip
# Clients send these back with a response's message.
HARMLESS_IN_MESSAGES = frozenset({"annotations", "cache_control", "id", "provider_specific_fields"})


@dataclass(frozen=True, slots=True)
class KnownFields:
    """Fields that a dialect knows although its requests do not have them.

    unsupported: each with the values that ask for nothing, which are accepted; so is null. harmless: fields that change
    no response. in_messages: all fields that an entry of `messages` may have; empty if the dialect does not check that.
    in_parts: all fields of parts of a message's content, by their types; parts of other types are not checked. A name
    such as "image.source" stands for the fields of the object `source` in a part of the type image.
    inside: fields of further objects, or further fields of a struct, by their paths, such as "tools[].function".
    reasons: what an error says about an unsupported field, beyond that it is not supported.
    """

    unsupported: Mapping[str, tuple[Any, ...]]
    harmless: frozenset[str] = frozenset()
    in_messages: frozenset[str] = frozenset()
    in_parts: Mapping[str, frozenset[str]] = field(default_factory=dict)
    inside: Nested = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=lambda: _REASONS)


# Beside fields that have an effect, those that only describe a schema, and Anthropic's cache_control: every prefix is
# cached. A schema always holds, whether it is strict or not.
_SCHEMA = frozenset({"name", "description", "schema", "strict"})
INSIDE: Nested = {
    "response_format": _SCHEMA | {"type", "json_schema", "format", "structures", "triggers"},
    "response_format.json_schema": _SCHEMA,
    "tool_choice": frozenset({"type", "function", "allowed_tools"}),
    "tool_choice.function": frozenset({"name"}),
    "tool_choice.allowed_tools": frozenset({"mode", "tools"}),
    "tools[]": frozenset({"cache_control"}),
    "tools[].function": frozenset({"cache_control"}),
}
IN_PARTS = {
    **dict.fromkeys(("text", "refusal"), frozenset({"type", "text", "refusal", "annotations", "cache_control", "id"})),
    "image_url": frozenset({"type", "image_url", "cache_control", "id"}),
    "image_url.image_url": frozenset({"url", "detail"}),
}
OPENAI_FIELDS = KnownFields(
    UNSUPPORTED, HARMLESS, HARMLESS_IN_MESSAGES.union(ChatMessage.__struct_fields__), IN_PARTS, INSIDE
)
# Routes that make the prompt of a chat get the chat's own body, in which these fields change no token of a prompt.
_NOT_OF_PROMPTS = frozenset({
    "include_reasoning", "max_completion_tokens", "parallel_tool_calls", "reasoning_budget", "reasoning_format",
    "record_conversation", "thinking_budget", "thinking_token_budget", "top_logprobs",
})  # fmt: skip
PROMPT_FIELDS = replace(
    OPENAI_FIELDS, unsupported={name: one for name, one in UNSUPPORTED.items() if name not in _NOT_OF_PROMPTS}
)


def refusal_of(name: str, value: Any, known: KnownFields) -> InvalidRequestError | None:
    """Return why the field cannot be served; None if this value asks for nothing."""
    if value is None or value in known.unsupported[name]:
        return None
    reason = known.reasons.get(name, "is not supported here")
    # A reason that goes on after a colon says what to do in place of it.
    return UnsupportedError(f"{name} {reason}{'' if ': ' in reason else '; leave it out'}", param=name)
