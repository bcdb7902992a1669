"""Tokenizers of encoders from their old files: the same ids as transformers, for texts and for pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import models, pre_tokenizers, trainers

from pagewick.errors import ModelLoadError
from pagewick.text.tokenizer import Tokenizer
from tests.models.word_pieces import TEXTS, word_pieces
from tests.text.tokenizers.hostile import HOSTILE, random_texts

ALL_TEXTS = [*TEXTS, *HOSTILE, *random_texts(60), "x" * 101, "[MASK] a", "caf\u0065\u0301 Ä", "漢字kana"]


def write_vocabulary(directory: Path, config: dict[str, Any], *, line_break: str = "\n") -> None:
    vocabulary = word_pieces().get_vocab()
    lines = sorted(vocabulary, key=vocabulary.__getitem__)
    (directory / "vocab.txt").write_bytes("".join(f"{line}{line_break}" for line in lines).encode())
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"model_type": "bert"}))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"do_lower_case": False, "tokenizer_class": "BertTokenizer"},
        {"do_lower_case": True, "strip_accents": False, "tokenizer_class": "BertTokenizerFast"},
        {"tokenize_chinese_chars": False, "do_lower_case": False, "strip_accents": True},
        {"tokenizer_class": "DistilBertTokenizer", "sep_token": "[SEP]", "unk_token": {"content": "[UNK]"}},
    ],
    ids=str,
)
def test_word_pieces_have_the_ids_of_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    write_vocabulary(tmp_path, config)
    plain = {name: value for name, value in config.items() if name not in ("tokenizer_class", "unk_token")}
    reference = transformers.BertTokenizer(str(tmp_path / "vocab.txt"), **plain)
    tokenizer = Tokenizer.from_directory(tmp_path)
    for text in ALL_TEXTS:
        assert tokenizer.encode(text, add_special_tokens=True) == reference(text)["input_ids"], text
        assert (
            tokenizer.encode(text, add_special_tokens=False) == reference(text, add_special_tokens=False)["input_ids"]
        )
    before, between, behind = tokenizer.pair_edges
    first, second = (reference(text, add_special_tokens=False)["input_ids"] for text in TEXTS[:2])
    assert [*before, *first, *between, *second, *behind] == reference(*TEXTS[:2])["input_ids"]


@pytest.mark.parametrize("name", ["do_lower_case", "strip_accents", "tokenize_chinese_chars"])
def test_tokenizer_config_wins_over_tokenizer_json(name: str, tmp_path: Path) -> None:
    word_pieces().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", name: False}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    found = [tokenizer.encode(text, add_special_tokens=True) for text in ALL_TEXTS]
    assert found == [reference(text)["input_ids"] for text in ALL_TEXTS]
    assert found != [word_pieces().encode(text).ids for text in ALL_TEXTS]


def test_line_breaks_of_windows_do_not_belong_to_pieces(tmp_path: Path) -> None:
    write_vocabulary(tmp_path, {}, line_break="\r\n")
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert [tokenizer.encode(text, add_special_tokens=True) for text in TEXTS] == [
        word_pieces().encode(text).ids for text in TEXTS
    ]


@pytest.mark.parametrize(
    ("vocabulary", "config", "message"),
    [
        (b"[UNK]\n[CLS]\na\n", {}, r"vocab\.txt has no token \[SEP\]"),
        (b"[UNK]\n[SEP]\n[CLS]\n\xff\xfe\n", {}, "not a text in UTF-8"),
        (b"[UNK]\n[SEP]\n[CLS]\n", {"tokenizer_class": "BertJapaneseTokenizer"}, "is of a BertJapaneseTokenizer"),
        (b"<unk>\n", {"unk_token": "<unk>"}, r"has no token \[SEP\]"),
    ],
)
def test_other_vocabularies_are_refused(
    vocabulary: bytes, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "vocab.txt").write_bytes(vocabulary)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=message):
        Tokenizer.from_directory(tmp_path)


def test_merges_of_roberta_have_tokens_around_texts(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=made.pre_tokenizer.alphabet(), show_progress=False
    )
    made.train_from_iterator(TEXTS * 20, trainer)
    made.model.save(str(tmp_path))
    config = {
        "tokenizer_class": "RobertaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>",
        "cls_token": "<s>", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>",
    }  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "roberta"}))
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    for text in ALL_TEXTS:
        if "<mask>" not in text:
            assert tokenizer.encode(text, add_special_tokens=True) == reference(text)["input_ids"], text
    before, between, behind = tokenizer.pair_edges
    first, second = (reference(text, add_special_tokens=False)["input_ids"] for text in TEXTS[:2])
    assert [*before, *first, *between, *second, *behind] == reference(*TEXTS[:2])["input_ids"]
