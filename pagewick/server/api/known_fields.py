"""Fields that are known and do nothing: those that are refused, and those that change no answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagewick.errors import InvalidRequestError, UnsupportedError
from pagewick.server.api.messages import ChatMessage

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # OpenAI's. Tools and structured output would be fields of ChatCompletionRequest.
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
    # Of one of the routes only.
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "suffix": ("",),
    # vLLM's.
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "guided_json": (),
    "guided_regex": ("",),
    "kv_transfer_params": ({},),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": ([],),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    # llama.cpp's.
    "dynatemp_exponent": (1,),
    "dynatemp_range": (0,),
    "grammar": ("",),
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
    "image_data": ([],),
    "json_schema": (),
    "lora": ([],),
    "min_keep": (0,),
    "n_discard": (0,),
    "n_indent": (0,),
    "n_keep": (0, -1),
    "post_sampling_probs": (False,),
    "preserved_tokens": ([],),
    "return_progress": (False,),
    "samplers": ([],),
    "t_max_predict_ms": (0, -1),
}
HARMLESS = frozenset({
    "id_slot", "metadata", "parallel_tool_calls", "parse_tool_calls", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user",
})  # fmt: skip
# What clients send back with an answer's message.
HARMLESS_IN_MESSAGES = frozenset({"annotations", "id", "provider_specific_fields"})


@dataclass(frozen=True, slots=True)
class KnownFields:
    """Those of a dialect that its requests have no fields for.

    unsupported: each with the values that ask for nothing, which are accepted; so is null. harmless: those that change
    no answer. in_messages: all that an entry of `messages` may have; none where the dialect does not look.
    """

    unsupported: Mapping[str, tuple[Any, ...]]
    harmless: frozenset[str] = frozenset()
    in_messages: frozenset[str] = frozenset()


OPENAI_FIELDS = KnownFields(UNSUPPORTED, HARMLESS, HARMLESS_IN_MESSAGES.union(ChatMessage.__struct_fields__))


def refusal_of(name: str, value: Any, accepted: tuple[Any, ...]) -> InvalidRequestError | None:
    """Why the field cannot be served; None if this value asks for nothing."""
    if value is None or value in accepted:
        return None
    if name == "response_format":
        kind = value.get("type") if isinstance(value, dict) else value
        # LangChain knows these words.
        message = f"'response_format' of type {str(kind)[:32]!r} is not supported with this model"
        return UnsupportedError(f"{message}; leave it out or use the type 'text'", param=name)
    return UnsupportedError(f"{name} is not supported here; leave it out", param=name)
