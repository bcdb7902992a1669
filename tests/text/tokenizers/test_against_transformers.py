"""Every kind of tokenizer gives the ids and the texts that transformers' AutoTokenizer gives for the same files."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from pagewick.errors import InvalidRequestError
from pagewick.text.control_tokens import CUT, Cutter
from pagewick.text.detokenizer import Detokenizer
from pagewick.text.tokenizer import Tokenizer
from tests.text.tokenizers.hostile import HOSTILE, random_texts
from tests.text.tokenizers.kinds import KINDS

TEXTS = [*HOSTILE, *random_texts(60)]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """Our tokenizer and transformers' for the same files."""
    kind = KINDS[request.param]
    directory = kind.write(tmp_path_factory.mktemp("tokenizers") / request.param)
    theirs = transformers.AutoTokenizer.from_pretrained(directory, **kind.options)
    return Tokenizer.from_directory(directory), theirs


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_encode(pair: tuple[Tokenizer, Any], add_special_tokens: bool) -> None:
    ours, theirs = pair
    for text in TEXTS:
        expected = theirs.encode(text, add_special_tokens=add_special_tokens)
        assert ours.encode(text, add_special_tokens=add_special_tokens) == expected, text
    assert ours.start_token_ids == [token_id for token_id in theirs.encode("") if token_id != theirs.eos_token_id]


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_decode(pair: tuple[Tokenizer, Any], skip_special_tokens: bool) -> None:
    ours, theirs = pair
    for text in TEXTS:
        token_ids = theirs.encode(text)
        expected = theirs.decode(token_ids, skip_special_tokens=skip_special_tokens)
        assert ours.decode(token_ids, skip_special_tokens=skip_special_tokens) == expected, text


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_what_is_streamed_is_what_is_decoded(pair: tuple[Tokenizer, Any], skip_special_tokens: bool) -> None:
    ours, theirs = pair
    before = theirs.encode("hello", add_special_tokens=False)
    for text in TEXTS:
        token_ids = theirs.encode(text, add_special_tokens=False)
        detokenizer = Detokenizer(ours, skip_special_tokens=skip_special_tokens)
        streamed = [*map(detokenizer.feed, token_ids), detokenizer.flush()]
        # Decoding may remove a space at the start of a text; a continuation keeps it.
        whole = theirs.decode([*before, *token_ids], skip_special_tokens=skip_special_tokens)
        assert "".join(streamed) == whole.removeprefix("hello"), text


def test_the_special_tokens_and_their_names(pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = pair
    assert ours.special_token_ids == set(theirs.all_special_ids) | {
        token_id for token_id, token in theirs.added_tokens_decoder.items() if token.special
    }
    assert (ours.bos_token, ours.eos_token) == (theirs.bos_token, theirs.eos_token)
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1


def test_special_tokens_that_a_user_wrote_are_plain_text(pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = pair
    special = [text for text, is_special in ours.added_tokens.items() if is_special]
    cutter = Cutter(special)
    unknown = theirs.convert_tokens_to_ids("<unk>")
    for text in (text.replace(CUT, "") for text in TEXTS):
        token_ids = ours.encode_pieces(cutter.cut(text).split(CUT))
        plain = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ours.special_token_ids.isdisjoint(set(token_ids) - {unknown}), text
        if not any(token in text for token in special):
            assert token_ids == plain, text
        elif unknown not in {*plain, *token_ids}:
            assert theirs.decode(token_ids) == theirs.decode(plain), text


def test_lone_surrogates_are_refused(pair: tuple[Tokenizer, Any]) -> None:
    for text in ("\ud800", "a\udfffb" * 1000):
        with pytest.raises(InvalidRequestError, match="not valid Unicode; remove the lone surrogate"):
            pair[0].encode(text, add_special_tokens=True)


def test_a_cut_adds_and_takes_nothing(pair: tuple[Tokenizer, Any]) -> None:
    """Pieces spell the text wherever it is cut; a vocabulary that adds a space before a text adds none within."""
    ours, _ = pair
    if ours.id_of("<0x00>") is None and ours.id_of("\u0120") is None:
        return  # it cannot spell unknown characters
    for text in ("a\n\n b", " a  b", "\na\tb ", "é\n\n\n你<", "x\r\n\r\n", "▁a▁ b"):
        whole = spelled(ours, ours.encode(text, add_special_tokens=False))
        for cut in range(1, len(text)):
            assert spelled(ours, ours.encode_pieces([text[:cut], text[cut:]])) == whole, (text, cut)


def spelled(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, token_ids)).decode()
