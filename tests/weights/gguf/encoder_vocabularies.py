"""The key-values with which llama.cpp's converter describes the tokenizers of encoders."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import tokenizers

from pagewick.weights.gguf.vocabulary import TokenType

_PREFIX = "tokenizer.ggml."


def word_piece_values(backend: tokenizers.Tokenizer, vocab_size: int = 0, **more: Any) -> dict[str, Any]:
    """Return the keys of a tokenizer like BERT's, and `more`. vocab_size: rows of the table, if more than tokens."""
    tokens, types = _tokens(backend, vocab_size)
    for token_id, token in enumerate(tokens):
        if types[token_id] != TokenType.CONTROL:
            tokens[token_id] = token[2:] if token.startswith("##") else f"\u2581{token}"
    roles = {"unknown": "[UNK]", "seperator": "[SEP]", "padding": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
    found = {"model": "bert", "pre": "jina-v2-en", "tokens": tokens, "token_type": types, "token_type_count": 2}
    return _prefixed({**found, **_ids(backend, roles), **more})


def unigram_values(backend: tokenizers.Tokenizer, vocab_size: int = 0, **more: Any) -> dict[str, Any]:
    """Return the keys of a tokenizer like XLM-RoBERTa's."""
    tokens, types = _tokens(backend, vocab_size)
    state = json.loads(backend.to_str())
    scores = [float(score) for _, score in state["model"]["vocab"]]
    types[tokens.index("<unk>")] = int(TokenType.UNKNOWN)
    found: dict[str, Any] = {
        "model": "t5", "pre": "default", "tokens": tokens, "token_type": types, "token_type_count": 1,
        "scores": [*scores, *[-10000.0] * (len(tokens) - len(scores))],
        "add_space_prefix": True, "remove_extra_whitespaces": True,
    }  # fmt: skip
    normalizer = state["normalizer"] or {}
    if "precompiled_charsmap" in normalizer:
        found["precompiled_charsmap"] = list(base64.b64decode(normalizer["precompiled_charsmap"]))
    return _prefixed({**found, **_ids(backend, _ROBERTA), "add_bos_token": True, "add_eos_token": True, **more})


def byte_level_values(backend: tokenizers.Tokenizer, pre: str, vocab_size: int = 0, **more: Any) -> dict[str, Any]:
    """Return the keys of a tokenizer like RoBERTa's (pre: roberta-bpe) or ModernBERT's (modern-bert)."""
    tokens, types = _tokens(backend, vocab_size)
    merges = [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    roles = _ROBERTA if pre == "roberta-bpe" else _MODERN
    found = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges}
    flags = dict.fromkeys(("add_bos_token", "add_eos_token", "add_sep_token"), True)
    return _prefixed({**found, **_ids(backend, roles), **flags, **more})


_ROBERTA = {
    "bos": "<s>", "eos": "</s>", "unknown": "<unk>", "seperator": "</s>", "padding": "<pad>", "cls": "<s>",
    "mask": "<mask>",
}  # fmt: skip
_MODERN = {
    "bos": "[CLS]", "eos": "[SEP]", "unknown": "[UNK]", "seperator": "[SEP]", "padding": "[PAD]", "cls": "[CLS]",
    "mask": "[MASK]",
}  # fmt: skip


def _tokens(backend: tokenizers.Tokenizer, vocab_size: int) -> tuple[list[str], list[int]]:
    vocabulary = backend.get_vocab(with_added_tokens=True)
    size = max(vocab_size, *(token_id + 1 for token_id in vocabulary.values()))
    tokens, types = [f"[PAD{token_id}]" for token_id in range(size)], [int(TokenType.UNUSED)] * size
    added = backend.get_added_tokens_decoder()
    for token, token_id in vocabulary.items():
        tokens[token_id], types[token_id] = token, int(TokenType.NORMAL)
        if token_id in added:
            types[token_id] = int(TokenType.CONTROL if added[token_id].special else TokenType.USER_DEFINED)
    return tokens, types


def _ids(backend: tokenizers.Tokenizer, roles: Mapping[str, str]) -> dict[str, int]:
    found = {f"{role}_token_id": backend.token_to_id(token) for role, token in roles.items()}
    return {key: token_id for key, token_id in found.items() if token_id is not None}


def _prefixed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{_PREFIX}{key}": value for key, value in values.items() if value is not None}


def add_values(writer: Any, values: Mapping[str, Any]) -> None:
    """Add key-values to a file of the `gguf` package, each with the type of its Python value."""
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            # Rules of normalisation are bytes.
            writer.add_array(key, bytes(value) if key.endswith("charsmap") else value)
