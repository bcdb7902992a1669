"""Tokenizers as GGUF metadata, read back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

import pytest
import tokenizers
from tokenizers import models

from pagewick.demo import MODEL_DIR
from pagewick.errors import ModelLoadError
from pagewick.text.chat_template import ChatTemplate
from pagewick.text.gguf_tokenizer import gguf_templates, gguf_tokenizer
from pagewick.text.gguf_vocabulary import _name_of_splitting, gguf_vocabulary
from pagewick.text.pre_tokenizers import PRE_TOKENIZERS
from pagewick.text.tokenizer import Tokenizer
from pagewick.weights.gguf.vocabulary import TokenType, end_token_ids
from tests.text.tokenizers.hostile import HOSTILE
from tests.text.tokenizers.kinds import KINDS

# Kind -> tokenizer.ggml.model, and what GGUF files call its way to split text.
WRITTEN: Final = {
    "llama-3": ("gpt2", "llama3"),
    "qwen2": ("gpt2", "qwen2"),
    "starcoder": ("gpt2", "starcoder"),
    "mistral-0.1": ("llama", "default"),
    "llama-2": ("llama", "default"),
    "gemma": ("llama", "default"),
    "glm-4": ("gpt2", "dbrx"),
    "deepseek-v3": ("gpt2", "deepseek-v3"),
}
REFUSED: Final = {"unigram": "is of the kind Unigram", "stablelm": "splits text into words in a way that has no name"}


def read_back(directory: Path, vocab_size: int) -> tuple[Tokenizer, dict[str, object], list[str]]:
    values, notes = gguf_vocabulary(directory, vocab_size)
    backend, config = gguf_tokenizer(values, "m.gguf")
    return Tokenizer(backend, config=config, eos_token_ids=end_token_ids(values)), values, notes


@pytest.mark.parametrize("kind", WRITTEN)
def test_ids_are_those_of_the_files(kind: str, tmp_path: Path) -> None:
    directory = KINDS[kind].write(tmp_path / "m")
    expected = Tokenizer.from_directory(directory)
    found, values, notes = read_back(directory, expected.vocab_size + 3)
    assert (values["tokenizer.ggml.model"], values["tokenizer.ggml.pre"]) == WRITTEN[kind]
    special = expected.special_tokens.values()
    for text in HOSTILE:
        begins_otherwise = kind == "llama-2" and text.startswith((" ", "\u2581"))
        if not begins_otherwise and not any(token in text for token in (*special, *expected.added_tokens)):
            assert found.encode(text, add_special_tokens=False) == expected.encode(text, add_special_tokens=False), text
    assert found.bos_token == expected.bos_token and found.eos_token == expected.eos_token
    assert (
        found.added_tokens.items()
        >= {token: is_special for token, is_special in expected.added_tokens.items() if is_special}.items()
    )
    types = values["tokenizer.ggml.token_type"]
    assert isinstance(types, list) and types[-3:] == [TokenType.UNUSED] * 3
    if kind == "glm-4":  # GGUF files have one token that begins a text
        assert notes == ["the tokenizer makes [gMASK] <sop> a of the text a, and readers make a of it"]
    elif kind == "llama-2":  # readers put a space before every text, also before one that begins with a space
        assert len(notes) == 1 and notes[0].startswith("readers of the file make other tokens of some texts, such as '")
    else:
        assert not notes
        assert found.encode("Hi", add_special_tokens=True) == expected.encode("Hi", add_special_tokens=True)


@pytest.mark.parametrize("kind", REFUSED)
def test_tokenizers_that_files_cannot_describe(kind: str, tmp_path: Path) -> None:
    directory = KINDS[kind].write(tmp_path / "m")
    with pytest.raises(ModelLoadError, match=REFUSED[kind]):
        gguf_vocabulary(directory, 1000)


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_way_to_split_text_is_recognised(name: str, tmp_path: Path) -> None:
    wanted = PRE_TOKENIZERS[name]
    backend = tokenizers.Tokenizer(models.BPE({}, [], ignore_merges=wanted.ignores_merges))
    backend.pre_tokenizer = wanted.make()
    if wanted.normalizer is not None:
        backend.normalizer = wanted.normalizer
    found = PRE_TOKENIZERS[_name_of_splitting(backend, tmp_path)]
    assert (found.expressions, found.ignores_merges) == (wanted.expressions, wanted.ignores_merges)
    assert (found.normalizer is None) == (wanted.normalizer is None)


def test_the_built_in_tokenizer_and_its_templates(tmp_path: Path) -> None:
    directory = tmp_path / "m"
    shutil.copytree(MODEL_DIR, directory)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings["chat_template"] = [
        {"name": "default", "template": settings["chat_template"]},
        {"name": "tool_use", "template": "{{ messages }}"},
    ]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7, 300]}))
    vocab_size = json.loads((MODEL_DIR / "config.json").read_text())["vocab_size"]
    found, values, notes = read_back(directory, vocab_size)
    assert not notes
    assert {one["name"]: one["template"] for one in gguf_templates(values)} == {
        one["name"]: one["template"] for one in settings["chat_template"]
    }
    assert set(found.eos_token_ids) >= {2, 7, 300}
    assert ChatTemplate.from_directory(MODEL_DIR, Tokenizer.from_directory(MODEL_DIR)) is not None
    expected = Tokenizer.from_directory(MODEL_DIR)
    for text in (*HOSTILE, "<|im_start|>user\nhi<|im_end|>"):
        assert found.encode(text, add_special_tokens=True) == expected.encode(text, add_special_tokens=True), text
    assert found.added_tokens == expected.added_tokens


def test_tokens_beyond_the_embedding_are_left_out(tmp_path: Path) -> None:
    values, _ = gguf_vocabulary(MODEL_DIR, 4000)
    assert len(values["tokenizer.ggml.tokens"]) == len(values["tokenizer.ggml.token_type"]) == 4000
