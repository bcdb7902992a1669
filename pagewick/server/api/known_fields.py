"""Known fields that do nothing: those that are refused, and those that change no response."""

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
    # These are fields of some routes.
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
# Clients send these back with a response's message.
HARMLESS_IN_MESSAGES = frozenset({"annotations", "id", "provider_specific_fields"})


@dataclass(frozen=True, slots=True)
class KnownFields:
    """Fields that a dialect knows although its requests do not have them.

    unsupported: each with the values that ask for nothing, which are accepted; so is null. harmless: fields that change
    no response. in_messages: all fields that an entry of `messages` may have; empty if the dialect does not check that.
    """

    unsupported: Mapping[str, tuple[Any, ...]]
    harmless: frozenset[str] = frozenset()
    in_messages: frozenset[str] = frozenset()


OPENAI_FIELDS = KnownFields(UNSUPPORTED, HARMLESS, HARMLESS_IN_MESSAGES.union(ChatMessage.__struct_fields__))


def refusal_of(name: str, value: Any, accepted: tuple[Any, ...]) -> InvalidRequestError | None:
    """Return why the field cannot be served; None if this value asks for nothing."""
    if value is None or value in accepted:
        return None
    if name == "response_format":
        kind = value.get("type") if isinstance(value, dict) else value
        # LangChain knows these words.
        message = f"'response_format' of type {str(kind)[:32]!r} is not supported with this model"
        return UnsupportedError(f"{message}; leave it out or use the type 'text'", param=name)
    return UnsupportedError(f"{name} is not supported here; leave it out", param=name)
