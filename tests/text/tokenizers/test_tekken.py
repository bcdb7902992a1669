"""Mistral's tekken.json, against the reader in transformers."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from transformers.integrations.mistral.tokenizer import MistralConverter

from pagewick.errors import ModelLoadError
from pagewick.text.token_spelling import TokenSpelling
from pagewick.text.tokenizer import Tokenizer
from tests.text.tokenizers.hostile import HOSTILE, random_texts
from tests.text.tokenizers.kinds import byte_level

# The words of Mistral's files.
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
NUM_SPECIAL = 9
NUM_LEFT_OUT = 20


def content() -> dict[str, Any]:
    """A file whose vocabulary is longer than its model's, and which has ids without a token."""
    trained = byte_level([])
    spelling = TokenSpelling(trained)
    tokens = {spelling.bytes_of(token): token_id for token, token_id in trained.get_vocab().items()}
    ordered = sorted(tokens, key=lambda token: (len(token) > 1, tokens[token]))
    return {
        "config": {"pattern": PATTERN, "num_vocab_tokens": len(ordered), "default_num_special_tokens": NUM_SPECIAL,
                   "default_vocab_size": NUM_SPECIAL + len(ordered) - NUM_LEFT_OUT, "version": "v7"},
        "vocab": [{"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
                  for rank, token in enumerate(ordered)],
        "special_tokens": [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(SPECIAL)],
    }  # fmt: skip


def write(directory: Path, found: dict[str, Any]) -> Path:
    (directory / "tekken.json").write_text(json.dumps(found), encoding="utf-8")
    (directory / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    return directory


def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    found = content()
    ours = Tokenizer.from_directory(write(tmp_path, found))
    theirs = MistralConverter(str(tmp_path / "tekken.json")).converted()
    assert ours.vocab_size == theirs.get_vocab_size() == found["config"]["default_vocab_size"]
    num_merged = 0
    for text in [*HOSTILE, *random_texts(60), "<s>[INST] Hi[/INST]<SPECIAL_7>"]:
        token_ids = theirs.encode(text).ids
        assert ours.encode(text, add_special_tokens=False) == token_ids, text
        assert ours.encode(text, add_special_tokens=True) == [1, *token_ids]
        assert ours.decode(token_ids, skip_special_tokens=False) == theirs.decode(token_ids, skip_special_tokens=False)
        num_merged += sum(token_id >= NUM_SPECIAL + 256 for token_id in token_ids)
    assert num_merged > 100
    assert ours.special_token_ids == set(range(NUM_SPECIAL))
    assert (ours.bos_token, ours.eos_token, ours.eos_token_ids) == ("<s>", "</s>", (2,))
    assert Tokenizer.from_directory(tmp_path / "tekken.json").vocab_size == ours.vocab_size


def test_tokenizer_config_says_otherwise(tmp_path: Path) -> None:
    write(tmp_path, content())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False, "eos_token": "[/INST]"}))
    ours = Tokenizer.from_directory(tmp_path)
    assert ours.encode("a", add_special_tokens=True) == ours.encode("a", add_special_tokens=False)
    assert (ours.bos_token, ours.eos_token) == ("<s>", "[/INST]")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"special_tokens": None}, "no special_tokens.*use a model with tokenizer.json"),
        ({"special_tokens": [{"rank": 1, "token_str": "<s>"}]}, "not numbered from 0 to 8"),
        ({"special_tokens": [{"rank": rank, "token_str": f"{rank}"} for rank in range(10)]}, "numbered from 0 to 8"),
        ({"config": {"pattern": "("}}, "download the model again"),
        ({"config": None}, "download the model again"),
        ({"vocab": [{"rank": 0}]}, "token_bytes"),
    ],
)
def test_damaged_files_are_a_clear_error(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=rf"tekken\.json is not a usable tokenizer.*{complaint}"):
        Tokenizer.from_directory(write(tmp_path, {**content(), **changes}))
