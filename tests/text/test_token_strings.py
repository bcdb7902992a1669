"""Bad words and DRY's sequence breakers become tokens, for both kinds of vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers

from pagewick.sampling_params import SamplingParams
from pagewick.text.token_strings import MAX_CACHED_BREAKERS, MAX_CACHED_SETS, TokenStrings
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


def breakers_of(
    backend: tokenizers.Tokenizer, *breakers: str, vocab_size: int | None = None, **fields: Any
) -> tuple[set[int], list[list[int]]]:
    """Return the single tokens that break a sequence, and the token sequences that do."""
    params = SamplingParams(**{"dry_multiplier": 0.8, "dry_sequence_breakers": breakers, **fields})
    found = strings(backend, vocab_size)
    token_ids, mask = found.dry_breakers(params)
    assert len(mask) in (0, -(-found._vocab_size // 8))
    alone = {token_id for token_id in range(8 * len(mask)) if mask[token_id // 8] >> token_id % 8 & 1}
    assert bool(alone) == bool(mask), "nothing is sent for nothing"
    return alone, token_ids


@BACKENDS
@pytest.mark.parametrize("breaker", ["\n", ":", "e", "he", "o", "ll", "é", "😀", "q:"])
def test_a_breaker_is_every_token_that_contains_it_and_its_own_spelling(
    backend: tokenizers.Tokenizer, breaker: str
) -> None:
    alone, longer = breakers_of(backend, breaker)
    tokenizer = Tokenizer(backend, config={})
    assert alone == {i for i in range(tokenizer.vocab_size) if breaker.encode() in tokenizer.token_bytes(i)}
    assert all(len(token_ids) > 1 for token_ids in longer)
    assert [text_of(backend, token_ids) for token_ids in longer] == [breaker] * len(longer)
    assert bool(longer) == (breaker not in {text_of(backend, [i]) for i in alone})


def test_breakers_that_share_tokens_name_them_once() -> None:
    backend = byte_level_backend()
    alone, longer = breakers_of(backend, "h", "q:", "he", "h", "q:")
    assert alone == breakers_of(backend, "h")[0] | breakers_of(backend, "he")[0] | breakers_of(backend, "q:")[0]
    assert longer == breakers_of(backend, "q:")[1] and len(longer) == 1


def test_without_dry_there_are_no_breakers() -> None:
    assert breakers_of(byte_level_backend(), "h", dry_multiplier=0.0) == (set(), [])
    assert breakers_of(byte_level_backend()) == (set(), [])


def test_what_the_model_cannot_write_is_left_out() -> None:
    backend = byte_level_backend()
    (x,) = backend.encode("x", add_special_tokens=False).ids
    assert strings(backend, x + 1).bad_word_ids(SamplingParams(bad_words=("x",))) == [[x]]
    everywhere, _ = breakers_of(backend, "h")
    alone, _ = breakers_of(backend, "h", vocab_size=x + 1)
    assert alone == {token_id for token_id in everywhere if token_id <= x} and max(everywhere) > x
    q, colon = (backend.encode(char, add_special_tokens=False).ids[0] for char in "q:")
    assert breakers_of(backend, "q:", vocab_size=max(q, colon) + 1)[1] == [[q, colon]]
    assert breakers_of(backend, "q:", vocab_size=max(q, colon))[1] == []


def test_a_model_may_have_more_tokens_than_its_tokenizer() -> None:
    backend = byte_level_backend()
    usual, _ = breakers_of(backend, "h")
    assert breakers_of(backend, "h", vocab_size=5000)[0] == usual


def test_what_is_kept_of_breakers_is_limited() -> None:
    found = strings(byte_level_backend())
    for number in range(2 * MAX_CACHED_BREAKERS):
        found.dry_breakers(SamplingParams(dry_multiplier=1, dry_sequence_breakers=(str(number), "x")))
    assert found._mask_of.cache_info().currsize == MAX_CACHED_BREAKERS
    assert found._breakers.cache_info().currsize == MAX_CACHED_SETS


def test_the_vocabulary_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = Tokenizer.token_bytes

    def token_bytes(self: Tokenizer, token_id: int) -> bytes:
        read.append(token_id)
        return original(self, token_id)

    monkeypatch.setattr(Tokenizer, "token_bytes", token_bytes)
    found = strings(byte_level_backend())
    for breakers in (("\n",), ("\n", ":"), ("\n",), (":", "x")):
        found.dry_breakers(SamplingParams(dry_multiplier=1, dry_sequence_breakers=breakers))
    assert len(read) == len(set(read)) > 300
