"""Whatever the cuts, the pieces join to the full decode and never break a character."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewick.text.detokenizer import Detokenizer
from pagewick.text.tokenizer import Tokenizer
from tests.tiny_text import byte_level_backend, sentencepiece_backend

TOKENIZER = Tokenizer(byte_level_backend(), config={})
SENTENCEPIECE = Tokenizer(sentencepiece_backend(), config={})


def pieces(tokenizer: Tokenizer, token_ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*map(detokenizer.feed, token_ids), detokenizer.flush()]


@given(st.lists(st.integers(0, TOKENIZER.vocab_size + 5)), st.booleans())
def test_any_ids_join_to_the_full_decode(token_ids: list[int], skip_special_tokens: bool) -> None:
    joined = "".join(pieces(TOKENIZER, token_ids, skip_special_tokens=skip_special_tokens))
    assert joined == TOKENIZER.decode(token_ids, skip_special_tokens=skip_special_tokens)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")))
def test_text_never_shows_a_replacement_character(text: str) -> None:
    parts = pieces(TOKENIZER, TOKENIZER.encode(text, add_special_tokens=False), skip_special_tokens=False)
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


@given(st.text(st.sampled_from("he lo😀你\n")))
def test_byte_fallback_joins_to_the_text_and_keeps_the_leading_space(text: str) -> None:
    token_ids = SENTENCEPIECE.encode(text, add_special_tokens=False)
    expected = " " + text if text else ""
    assert "".join(pieces(SENTENCEPIECE, token_ids)) == expected


def test_emoji_comes_whole_with_its_last_byte() -> None:
    token_ids = [TOKENIZER.encode(char, add_special_tokens=False)[0] for char in "ab"]
    emoji = [byte_id(byte) for byte in "😀".encode()]
    parts = pieces(TOKENIZER, [token_ids[0], *emoji, token_ids[1]])
    assert parts == ["a", "", "", "", "😀", "b", ""]


def test_unfinished_character_shows_at_the_end_only() -> None:
    emoji = [byte_id(byte) for byte in "😀".encode()]
    assert pieces(TOKENIZER, emoji[:3]) == ["", "", "", "\ufffd"]


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_special_tokens_are_hidden_on_request_and_others_never(skip_special_tokens: bool) -> None:
    token_ids = TOKENIZER.encode("<|im_start|><think>x<|im_end|>", add_special_tokens=False)
    joined = "".join(pieces(TOKENIZER, token_ids, skip_special_tokens=skip_special_tokens))
    assert joined == ("<think>x" if skip_special_tokens else "<|im_start|><think>x<|im_end|>")


def byte_id(byte: int) -> int:
    return next(i for i in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes(i) == bytes([byte]))
