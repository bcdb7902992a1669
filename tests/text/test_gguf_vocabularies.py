"""Token ids of GGUF files' vocabularies, against those of llama.cpp."""

from __future__ import annotations

from typing import Any

import pytest

from pagewick.text.gguf_tokenizer import gguf_tokenizer
from pagewick.text.tokenizer import Tokenizer
from tests.text.gguf_vocabularies import FAMILIES, read_vocabularies


@pytest.fixture(scope="module")
def vocabularies() -> dict[str, dict[str, Any]]:
    return read_vocabularies()


@pytest.mark.parametrize("family", FAMILIES)
def test_token_ids_are_those_of_llama_cpp(family: str, vocabularies: dict[str, dict[str, Any]]) -> None:
    entry = vocabularies[family]
    backend, config = gguf_tokenizer(entry["values"], family)
    tokenizer = Tokenizer(backend, config=config, eos_token_ids=[1])
    assert len(entry["texts"]) > 40
    for text, token_ids in zip(entry["texts"], entry["token_ids"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == token_ids, text
