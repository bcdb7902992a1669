"""The vocabulary in a GGUF file's metadata. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Final

from pagewick.errors import ModelLoadError

_PREFIX: Final = "tokenizer.ggml."
# Keys of tokens that end a response.
_END_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id", "fim_pad_token_id", "fim_rep_token_id")
# Tokens that end a response in any model that has them, as llama.cpp recognises them too (llama-vocab.cpp).
_END_TOKENS: Final = frozenset(
    {
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
        "</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<｜end▁of▁sentence｜>", "<end_of_utterance>",
        "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<reponame>",
        "<|file_sep|>", "<turn|>", "<|tool_response>", "[e~[", "<|return|>", "<|call|>",
    }
)  # fmt: skip
# Tokens that end no response where all the others are: gpt-oss ends a message and goes on, Gemma 4 has HTML's tags.
_NO_ENDS: Final = {"<|end|>": ("<|return|>", "<|call|>"), "</s>": ("<|tool_response>",)}


class TokenType(IntEnum):
    """tokenizer.ggml.token_type; the numbers are SentencePiece's."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def vocabulary_value(values: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    """Return tokenizer.ggml.<key>. Raises ModelLoadError if it has another type than `kind`."""
    value = values.get(f"{_PREFIX}{key}", default)
    if value is not default and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise ModelLoadError(f"{_PREFIX}{key} must be {kind.__name__}\n  use another GGUF file of this model")
    return value


def token_id_of(values: Mapping[str, Any], key: str, tokens: Sequence[str]) -> int | None:
    """Return tokenizer.ggml.<key> if it is the id of one of the tokens. Raises ModelLoadError if it is no number."""
    token_id: int | None = vocabulary_value(values, key, int)
    return token_id if token_id is not None and 0 <= token_id < len(tokens) else None


def token_types(values: Mapping[str, Any], num_tokens: int) -> list[int]:
    """Return the TokenType of each token; all are normal if the file does not say. Raises ModelLoadError."""
    types: list[int] = vocabulary_value(values, "token_type", list) or [TokenType.NORMAL] * num_tokens
    if len(types) != num_tokens:
        raise ModelLoadError(
            f"{_PREFIX}token_type has {len(types)} entries for {num_tokens} tokens\n"
            "  use another GGUF file of this model"
        )
    return types


def end_token_ids(values: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end a response, in ascending order. Raises ModelLoadError for a malformed vocabulary."""
    tokens: list[str] = vocabulary_value(values, "tokens", list) or []
    found = {vocabulary_value(values, key, int) for key in _END_KEYS} - {None}
    ordinary = (TokenType.NORMAL, TokenType.UNUSED, TokenType.BYTE)
    types = token_types(values, len(tokens))
    named = {token: i for i, token in enumerate(tokens) if token in _END_TOKENS and types[i] not in ordinary}
    for token, others in _NO_ENDS.items():
        if named.keys() >= {token, *others}:
            del named[token]
    found |= set(named.values())
    return sorted(token_id for token_id in found if not tokens or 0 <= token_id < len(tokens))
