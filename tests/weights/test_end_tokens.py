"""The end token that a tokenizer's files name, in the places where published checkpoints have it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagewick.demo import MODEL_DIR
from pagewick.errors import ModelLoadError
from pagewick.text.tokenizer import Tokenizer
from pagewick.weights.end_tokens import tokenizer_end_ids

END = {"eos_token": "<|im_end|>"}
CONFIG = "tokenizer_config.json"


def ends(directory: Path, files: dict[str, Any]) -> list[int]:
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content), encoding="utf-8")
    return tokenizer_end_ids(directory)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({CONFIG: {**END, "added_tokens_decoder": {"7": {"content": "<|im_end|>"}, "8": {"content": "<s>"}}}}, [7]),
        (
            {
                CONFIG: {"eos_token": {"__type": "AddedToken", "content": "<|im_end|>"}},
                "added_tokens.json": {"<|im_end|>": 8},
            },
            [8],
        ),
        (
            {
                CONFIG: {},
                "special_tokens_map.json": END,
                "tokenizer.json": {"added_tokens": [{"id": 9, "content": "<|im_end|>"}]},
            },
            [9],
        ),
        ({CONFIG: END, "tokenizer.json": {"added_tokens": [], "model": {"vocab": {"<|im_end|>": 3}}}}, [3]),
        ({CONFIG: END, "tokenizer.json": {"model": {"vocab": [["<|im_end|>", 0.0]]}}}, []),
        ({CONFIG: {**END, "added_tokens_decoder": {"x": {"content": "<|im_end|>"}}}}, []),
        ({CONFIG: {"eos_token": None}}, []),
        ({}, []),
    ],
)
def test_the_place_of_an_end_token(files: dict[str, Any], expected: list[int], tmp_path: Path) -> None:
    assert ends(tmp_path, files) == expected
    assert tokenizer_end_ids(tmp_path / "tokenizer.json") == expected
    assert tokenizer_end_ids(tmp_path / "m.gguf") == []


def test_the_built_in_model() -> None:
    tokenizer = Tokenizer.from_directory(MODEL_DIR)
    assert tokenizer.eos_token is not None
    assert tokenizer_end_ids(MODEL_DIR) == [tokenizer.id_of(tokenizer.eos_token)]


def test_a_large_file_is_read_only_where_no_other_has_the_token(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    assert ends(tmp_path, {CONFIG: {**END, "added_tokens_decoder": {"7": {"content": "<|im_end|>"}}}}) == [7]


def test_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text("{", encoding="utf-8")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json is not valid JSON"):
        tokenizer_end_ids(tmp_path)
