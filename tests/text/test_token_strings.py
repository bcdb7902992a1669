"""Bad words and DRY's breakers as tokens, over both kinds of vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers

from pagewick.sampling_params import SamplingParams
from pagewick.text.token_strings import TokenStrings
from pagewick.text.tokenizer import Tokenizer
from tests.tiny_text import byte_level_backend, sentencepiece_backend

BACKENDS = pytest.mark.parametrize("backend", [byte_level_backend(), sentencepiece_backend()], ids=["bytes", "pieces"])


def strings(backend: tokenizers.Tokenizer, vocab_size: int | None = None) -> TokenStrings:
    tokenizer = Tokenizer(backend, config={"bos_token": "<s>", "add_bos_token": True})
    return TokenStrings(tokenizer, tokenizer.vocab_size if vocab_size is None else vocab_size)


def text_of(backend: tokenizers.Tokenizer, token_ids: list[int]) -> str:
    tokenizer = Tokenizer(backend, config={})
    return b"".join(tokenizer.token_bytes(token_id) for token_id in token_ids).decode(errors="replace")


@BACKENDS
@pytest.mark.parametrize("word", ["hello", "x", "é", "the lazy dog", "\n", "<|im_end|>"])
def test_a_bad_word_is_banned_alone_and_after_a_space(backend: tokenizers.Tokenizer, word: str) -> None:
    found = strings(backend).bad_word_ids(SamplingParams(bad_words=(word,)))
    assert [text_of(backend, token_ids) for token_ids in found] == [word, f" {word}"]


def test_bad_words_are_spelled_as_the_model_spells_them() -> None:
    backend = byte_level_backend()
    ids = {word: backend.encode(word, add_special_tokens=False).ids for word in ("hello", " hello", " ", "  hello")}
    found = strings(backend).bad_word_ids(SamplingParams(bad_words=("hello", " hello")))
    assert found == [ids["hello"], ids[" hello"], ids["  hello"]]
    assert strings(backend).bad_word_ids(SamplingParams()) == []


def breaker_ids(backend: tokenizers.Tokenizer, *breakers: str, **fields: Any) -> list[list[int]]:
    params = SamplingParams(**{"dry_multiplier": 0.8, "dry_sequence_breakers": breakers, **fields})
    return strings(backend).dry_breaker_ids(params)


@BACKENDS
@pytest.mark.parametrize("breaker", ["\n", ":", "e", "he", "o", "ll", "é", "😀", "q:"])
def test_a_breaker_is_every_token_that_contains_it_and_its_own_spelling(
    backend: tokenizers.Tokenizer, breaker: str
) -> None:
    found = breaker_ids(backend, breaker)
    tokenizer = Tokenizer(backend, config={})
    containing = {i for i in range(tokenizer.vocab_size) if breaker.encode() in tokenizer.token_bytes(i)}
    assert {token_ids[0] for token_ids in found if len(token_ids) == 1} == containing
    longer = [token_ids for token_ids in found if len(token_ids) > 1]
    assert [text_of(backend, token_ids) for token_ids in longer] == [breaker] * len(longer)
    assert bool(longer) == (breaker not in {text_of(backend, [i]) for i in containing})


def test_breakers_that_share_tokens_name_them_once() -> None:
    backend = byte_level_backend()
    together = breaker_ids(backend, "h", "he", "h")
    assert len(together) == len({*map(tuple, together)})
    assert {*map(tuple, together)} == {*map(tuple, breaker_ids(backend, "h")), *map(tuple, breaker_ids(backend, "he"))}


def test_without_dry_there_are_no_breakers() -> None:
    assert breaker_ids(byte_level_backend(), "h", dry_multiplier=0.0) == []


def test_what_the_model_cannot_write_is_left_out() -> None:
    backend = byte_level_backend()
    (x,) = backend.encode("x", add_special_tokens=False).ids
    narrow = strings(backend, vocab_size=x + 1)
    assert narrow.bad_word_ids(SamplingParams(bad_words=("x",))) == [[x]]
    found = narrow.dry_breaker_ids(SamplingParams(dry_multiplier=1, dry_sequence_breakers=("h",)))
    assert found and max(max(token_ids) for token_ids in found) <= x


def test_the_vocabulary_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = Tokenizer.token_bytes

    def token_bytes(self: Tokenizer, token_id: int) -> bytes:
        read.append(token_id)
        return original(self, token_id)

    monkeypatch.setattr(Tokenizer, "token_bytes", token_bytes)
    found = strings(byte_level_backend())
    for breakers in (("\n",), ("\n", ":"), ("\n",), (":", "x")):
        found.dry_breaker_ids(SamplingParams(dry_multiplier=1, dry_sequence_breakers=breakers))
    assert len(read) == len(set(read)) > 300
