"""Checks that the token ids of a draft model mean the same as those of the served model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.models.config import ModelConfig
from pagewick.weights.description import is_gguf
from pagewick.weights.gguf.checkpoint import open_gguf

_FIX = "use a smaller model of the same family"


def check_vocabulary(draft: ModelConfig, target: ModelConfig) -> None:
    """Raise ConfigError if the draft has more tokens than the served model (`target`)."""
    if draft.vocab_size > target.vocab_size:
        raise ConfigError(
            f"--speculative-model has a vocabulary of {draft.vocab_size} tokens and the model one of "
            f"{target.vocab_size}: its draft tokens could be unknown to the model; {_FIX}"
        )


def check_same_tokens(draft: Path, target: Path) -> None:
    """Raise ConfigError if a token id stands for different tokens in the two models.

    They are compared only if both have a tokenizer.json or are GGUF files. Raises ModelLoadError if one cannot be read.
    """
    files = [path if is_gguf(path) else path / "tokenizer.json" for path in (draft, target)]
    if not all(file.is_file() for file in files):
        return
    ours, theirs = (_token_of_id(file) for file in files)
    different = [token_id for token_id in sorted(ours.keys() & theirs.keys()) if ours[token_id] != theirs[token_id]]
    if different:
        first = different[0]
        raise ConfigError(
            f"--speculative-model {draft} and the model {target} have different vocabularies: {len(different)} token "
            f"ids differ, the first is {first}, {ours[first]!r} here and {theirs[first]!r} there; {_FIX}"
        )


def _token_of_id(file: Path) -> dict[int, str]:
    """Return token id -> token for a tokenizer.json, its model's vocabulary and the added tokens, or a GGUF file."""
    if is_gguf(file):
        return dict(enumerate(open_gguf(file).values.get("tokenizer.ggml.tokens", ())))
    try:
        content: Any = json.loads(file.read_bytes())
        vocabulary = content["model"]["vocab"]
        # Unigram models list [token, score] by id, the others map tokens to ids.
        if isinstance(vocabulary, list):
            tokens = {token_id: token for token_id, (token, _) in enumerate(vocabulary)}
        else:
            tokens = {token_id: token for token, token_id in vocabulary.items()}
        return tokens | {token["id"]: token["content"] for token in content.get("added_tokens") or []}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelLoadError(f"{file} is not a usable tokenizer ({error!r}); download the model again") from None
