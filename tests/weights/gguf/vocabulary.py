"""Writes a tokenizer of byte pairs into GGUF files, as llama.cpp's converter does."""

from __future__ import annotations

from typing import Any

import gguf


def add_vocabulary(writer: Any, tokenizer: dict[str, Any], vocab_size: int, *, pre_tokenizer: str) -> None:
    """tokenizer: the contents of tokenizer.json. vocab_size: that of the model, which may have room for more tokens."""
    tokens = [f"[PAD{token_id}]" for token_id in range(vocab_size)]
    types = [gguf.TokenType.UNUSED] * vocab_size
    for text, token_id in tokenizer["model"]["vocab"].items():
        tokens[token_id], types[token_id] = text, gguf.TokenType.NORMAL
    for token in tokenizer["added_tokens"]:
        tokens[token["id"]] = token["content"]
        types[token["id"]] = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_add_bos_token(False)
