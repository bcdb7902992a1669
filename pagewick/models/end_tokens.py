"""The tokens that end a sequence, as the files of a model name them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagewick.errors import ModelLoadError
from pagewick.models.entries import Entries


def eos_token_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end a sequence: generation_config.json's, else config.json's. Raises ModelLoadError.

    Moondream's stands with its own entries, and what generation_config.json says is from older revisions.
    """
    if config.get("architectures") == ["HfMoondream"]:
        inner = Entries(config).child("config")
        tokens = None if inner is None else inner.child("tokenizer")
        return [0 if tokens is None else tokens.count("eos_id", 0)]
    value, file_name = generation_config.get("eos_token_id"), "generation_config.json"
    if value is None:
        value, file_name = config.get("eos_token_id"), "config.json"
    token_ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in token_ids):
        raise ModelLoadError(
            f"{file_name}: eos_token_id is {f'{value!r}'[:80]}, and must be a token id or a list of them\n"
            "  correct it, or download the file again"
        )
    return token_ids
