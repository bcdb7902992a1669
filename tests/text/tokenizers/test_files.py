"""The files from which a tokenizer is read, and the errors for unusable ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import Regex, decoders, normalizers

from pagewick.errors import ModelLoadError
from pagewick.text.tokenizer import Tokenizer
from tests.models.word_pieces import word_pieces
from tests.text.tokenizers.hostile import HOSTILE, random_texts
from tests.text.tokenizers.kinds import KINDS, byte_level

CLASSES = {"GPT2Tokenizer": "gpt2", "CodeGenTokenizer": "codegen", "Qwen2Tokenizer": "qwen3"}


def write_merges(directory: Path, tokenizer_class: str, **config: Any) -> Path:
    """Write GPT-2's two files, from a vocabulary trained with GPT-2's words."""
    backend = byte_level([], added=["<|endoftext|>"])
    backend.model.save(str(directory))
    vocab = json.loads((directory / "vocab.json").read_text(encoding="utf-8"))
    (directory / "vocab.json").write_text(json.dumps(vocab | {"<|endoftext|>": len(vocab)}), encoding="utf-8")
    model_type = CLASSES.get(tokenizer_class, "gpt2")
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
    content = {"tokenizer_class": tokenizer_class, "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")
    return directory


@pytest.mark.parametrize("tokenizer_class", CLASSES)
def test_a_vocabulary_and_merges_as_transformers_reads_them(tmp_path: Path, tokenizer_class: str) -> None:
    bos = {"bos_token": "<|endoftext|>"} if tokenizer_class != "Qwen2Tokenizer" else {}
    write_merges(tmp_path, tokenizer_class, **bos)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert type(theirs).__name__ == tokenizer_class
    ours = Tokenizer.from_directory(tmp_path)
    for text in [*HOSTILE, *random_texts(60)]:
        token_ids = theirs.encode(text)
        assert ours.encode(text, add_special_tokens=True) == token_ids, text
        assert ours.decode(token_ids, skip_special_tokens=False) == theirs.decode(token_ids), text
    assert ours.special_token_ids == set(theirs.all_special_ids)


def test_words_that_nobody_knows_how_to_cut(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="tokenizer_class is OwnTokenizer, not GPT2Tokenizer"):
        Tokenizer.from_directory(write_merges(tmp_path, "OwnTokenizer"))


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[1]", b"one two three"])
def test_damaged_merges_are_a_clear_error(tmp_path: Path, name: str, content: bytes) -> None:
    write_merges(tmp_path, "GPT2Tokenizer")
    if (name, content) == ("merges.txt", b""):
        return  # a vocabulary of single bytes has no merges
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match="is not a usable tokenizer"):
        Tokenizer.from_directory(tmp_path)


def test_tokens_that_only_the_configuration_lists(tmp_path: Path) -> None:
    kind = KINDS["qwen2"]
    directory = kind.write(tmp_path / "model")
    listed = {str(i): {"content": f"<|more_{i}|>", "special": i % 2 == 0} for i in range(425, 428)}
    known = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    listed |= {str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in known}
    content = json.dumps({**kind.config, "added_tokens_decoder": listed, "pad_token": "<|pad|>"})
    (directory / "tokenizer_config.json").write_text(content, encoding="utf-8")
    ours, theirs = Tokenizer.from_directory(directory), transformers.AutoTokenizer.from_pretrained(directory)
    for text in ("<|more_425|> <|more_426|>", "a<|more_427|><|pad|>"):
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    assert ours.special_token_ids == {i for i, token in theirs.added_tokens_decoder.items() if token.special}


@pytest.mark.parametrize(
    "listed",
    [
        {"x": {"content": "a"}},
        {"5": {"text": "a"}},
        {"5": "a"},
        {"5": {"content": 7}},
        [1],
        {"5": {"content": "<|q|>"}},
    ],
)
def test_a_malformed_list_of_tokens_is_a_clear_error(tmp_path: Path, listed: Any) -> None:
    directory = KINDS["qwen2"].write(tmp_path / "model")
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}), encoding="utf-8")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json is not a usable tokenizer"):
        Tokenizer.from_directory(directory)


@pytest.mark.parametrize(
    "steps",
    [
        [normalizers.Replace("a", "a" * 1025)],
        [normalizers.Replace(Regex("$"), "b" * 1024)],
        [normalizers.Prepend("a" * 1024)],
        [normalizers.Replace("a", "a" * 11)] * 3,
        [
            normalizers.Sequence([normalizers.Replace("ab", "a" * 66)]),
            normalizers.Lowercase(),
            normalizers.Prepend("a" * 31),
        ],
    ],
)
def test_a_normalizer_that_makes_far_longer_texts_is_refused(
    tmp_path: Path, steps: list[normalizers.Normalizer]
) -> None:
    backend = byte_level([])
    backend.normalizer = normalizers.Sequence(steps)
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        ModelLoadError, match=r"its normalizer may make a text 1,\d{3} times as long, and the limit is 1,024"
    ):
        Tokenizer.from_directory(tmp_path)


def test_a_normalizer_may_make_longer_texts(tmp_path: Path) -> None:
    backend = byte_level([])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁" * 80)])
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_directory(tmp_path).encode("a b", add_special_tokens=False)) == 2 + 3 * 81


@pytest.mark.parametrize("decoder", [decoders.Strip(" ", 0, 1), decoders.CTC()])
def test_a_decoder_that_needs_the_whole_text_is_refused(decoder: decoders.Decoder) -> None:
    backend = byte_level([])
    backend.decoder = decoder
    with pytest.raises(ModelLoadError, match=f'decoder.*"{type(decoder).__name__}".* token by token'):
        Tokenizer(backend, config={})


@pytest.mark.parametrize("cleans_up", [True, False])
def test_word_pieces_are_spelled_as_they_are_decoded(cleans_up: bool) -> None:
    backend = tokenizers.Tokenizer.from_str(word_pieces().to_str())
    backend.decoder = decoders.WordPiece(cleanup=cleans_up)
    tokenizer = Tokenizer(backend, config={})
    text = "isn't the force, unaffordable? do not it's we've 12.50 china's ! the end ."
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(map(tokenizer.token_bytes, token_ids)).decode()
    assert joined.removeprefix(" ") == backend.decode(token_ids)
    every_pair = [[first, second] for first in range(5, 60) for second in range(5, backend.get_vocab_size())]
    for pair in every_pair:
        added = backend.decode(pair).removeprefix(backend.decode(pair[:1]))
        assert tokenizer.token_bytes(pair[1]).decode() == added


def test_special_tokens_may_be_left_unread(tmp_path: Path) -> None:
    backend: tokenizers.Tokenizer = byte_level([], added=["<s>"])
    tokenizer = Tokenizer(backend, config={"split_special_tokens": True})
    special = backend.token_to_id("<s>")
    assert special not in tokenizer.encode("a<s>b", add_special_tokens=False)


def test_a_path_that_is_no_text_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    directory = tmp_path / os.fsdecode(b"b\xffd")
    directory.mkdir()
    byte_level([]).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer.json").rename(directory / "tokenizer.json")
    with pytest.raises(ModelLoadError, match=r"the path .*/b\?d/tokenizer.json is not UTF-8.*rename it"):
        Tokenizer.from_directory(directory)
