"""Kimi's tiktoken.model, against the library tiktoken with the same ranks and expression."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import tiktoken

from pagewick.errors import ModelLoadError
from pagewick.text.token_spelling import TokenSpelling
from pagewick.text.tokenizer import Tokenizer
from tests.text.tokenizers.hostile import HOSTILE, random_texts
from tests.text.tokenizers.kinds import byte_level

# The expression of tokenization_kimi.py, where tiktoken's kind of regular expressions has intersections.
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
NAMED = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 9: "<think>"}
MORE = ["汉字和 English, 3.14159", "HTTPServer's café 汉a字B", "１２３ ៣៤ ʰ\u0301", " \u3000汉\n\n  x"]


def ranks() -> dict[bytes, int]:
    trained = byte_level([])
    spelling = TokenSpelling(trained)
    tokens = {spelling.bytes_of(token): token_id for token, token_id in trained.get_vocab().items()}
    ordered = sorted(tokens, key=lambda token: (len(token) > 1, tokens[token]))
    return {token: rank for rank, token in enumerate(ordered)}


def write(directory: Path, found: dict[bytes, int], **config: Any) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in found.items()]
    (directory / "tiktoken.model").write_text("".join(lines))
    listed = {str(len(found) + place): {"content": name, "special": name != "<think>"} for place, name in NAMED.items()}
    usual = {"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]"}
    settings = {**usual, "added_tokens_decoder": listed, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory


def test_tokens_are_those_of_tiktoken(tmp_path: Path) -> None:
    found = ranks()
    names = {NAMED.get(place, f"<|reserved_token_{len(found) + place}|>"): len(found) + place for place in range(256)}
    ours = Tokenizer.from_directory(write(tmp_path, found))
    theirs = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=found, special_tokens=names)
    assert ours.vocab_size == theirs.n_vocab == len(found) + 256
    num_merged = 0
    reserved = f"<|reserved_token_{len(found) + 5}|>"
    for text in [*HOSTILE, *MORE, *random_texts(60), f"[BOS]<think>Hi{reserved}<|im_end|>"]:
        token_ids = theirs.encode(text, allowed_special="all")
        assert ours.encode(text, add_special_tokens=True) == token_ids, text
        assert ours.decode(token_ids, skip_special_tokens=False) == theirs.decode(token_ids)
        num_merged += sum(token_id >= 256 for token_id in token_ids)
    assert num_merged > 100
    think = names["<think>"]
    assert ours.special_token_ids == set(names.values()) - {think}
    assert (ours.bos_token, ours.eos_token) == ("[BOS]", "[EOS]")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tokenizer_class": "QWenTokenizer"}, "tokenizer_class is QWenTokenizer, not Kimi's"),
        ({"tokenizer_class": None}, "tokenizer_class is not given"),
        ({"added_tokens_decoder": {str(len(ranks())): {"content": "a"}}}, "has the text of another token"),
        ({"added_tokens_decoder": {"0": {"content": "x"}}}, "listed with the id 0"),
    ],
)
def test_other_files_are_refused(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    write(tmp_path, ranks(), **changes)
    with pytest.raises(ModelLoadError, match=complaint):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("YQ== 0\n\nYg== 2\n", "not numbered from 0"),
        ("YQ== 0\nYg==\n", "line 2 is not a token"),
        ("? 0\n", "line 1 is not a token"),
        ("YQ== x\n", "line 1 is not a token"),
        ("YQ== 0\n", "no token for the byte 0"),
        ("", "no token for the byte 0"),
    ],
)
def test_malformed_files_are_refused(content: str, complaint: str, tmp_path: Path) -> None:
    write(tmp_path, ranks())
    (tmp_path / "tiktoken.model").write_text(content)
    with pytest.raises(ModelLoadError, match=rf"tiktoken\.model.*{complaint}"):
        Tokenizer.from_directory(tmp_path)


def test_tokens_that_are_too_long_are_refused(tmp_path: Path) -> None:
    write(tmp_path, {**{bytes([byte]): byte for byte in range(256)}, b"ab" * 40_000: 256}, added_tokens_decoder={})
    with pytest.raises(ModelLoadError, match=r"a token has 80,000 bytes, and the limit is 1,024"):
        Tokenizer.from_directory(tmp_path)
