"""A tokenizer.model gives the ids that the sentencepiece library gives for it; a damaged one is a clear error."""

from __future__ import annotations

import io
import json
import random
import struct
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from tokenizers import normalizers

from pagewick.errors import ModelLoadError
from pagewick.text.detokenizer import Detokenizer
from pagewick.text.sentencepiece_model import SentencePieceModel, charsmap_damage
from pagewick.text.tokenizer import Tokenizer
from tests.text.tokenizers.hostile import CORPUS, HOSTILE, random_texts

LLAMA = {"model_type": "bpe", "vocab_size": 560, "byte_fallback": True, "normalization_rule_name": "identity",
         "remove_extra_whitespaces": False, "split_digits": True, "allow_whitespace_only_pieces": True}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gemma": {**LLAMA, "add_dummy_prefix": False, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3,
              "user_defined_symbols": ["<h1>", "<start_of_turn>", "\n\n", "\n", "▁▁", "▁▁▁▁", "\t"]},
    "bpe without bytes": {"model_type": "bpe", "vocab_size": 300, "normalization_rule_name": "nmt_nfkc",
                          "control_symbols": ["<mask>"]},
    "unigram": {"model_type": "unigram", "vocab_size": 150, "normalization_rule_name": "nmt_nfkc_cf",
                "unk_id": 2, "bos_id": -1, "eos_id": 1, "pad_id": 0},
    "unigram with bytes": {**LLAMA, "model_type": "unigram", "vocab_size": 410, "normalization_rule_name": "nfkc"},
}  # fmt: skip


def train(**options: Any) -> bytes:
    written = io.BytesIO()
    texts = iter(" ".join(CORPUS).split("\n"))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=texts, model_writer=written, character_coverage=0.98, minloglevel=2, num_threads=1,
        **options,
    )  # fmt: skip
    return written.getvalue()


def write(directory: Path, data: bytes, **config: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.model").write_bytes(data)
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> bytes:
    return train(**KINDS[request.param])


@pytest.fixture(scope="module")
def llama() -> bytes:
    return train(**LLAMA)


def texts_without_control(library: Any, texts: list[str]) -> list[str]:
    """The library never finds control tokens in a text, nor `<unk>`."""
    control = [library.id_to_piece(i) for i in range(library.vocab_size()) if library.is_control(i)]
    return [text for text in texts if not any(token in text for token in [*control, "<unk>"])]


@pytest.mark.parametrize("legacy", [True, False])
def test_the_ids_are_the_library_s(model: bytes, tmp_path: Path, legacy: bool) -> None:
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokenizer = Tokenizer.from_directory(write(tmp_path, model, legacy=legacy))
    read = SentencePieceModel.read(tmp_path / "tokenizer.model")
    for text in texts_without_control(library, [*HOSTILE, *random_texts(300)]):
        # Here transformers, which we follow, differs from the library.
        if (read.charsmap and any(map(unicodedata.combining, text))) or (read.is_unigram and "<0x" in text):
            continue
        token_ids = library.encode(text)
        # Two orders of the same unigrams are equally likely; either is correct.
        as_read = sorted if read.is_unigram else list
        assert as_read(tokenizer.encode(text, add_special_tokens=False)) == as_read(token_ids), text
        if library.unk_id() not in token_ids:
            assert tokenizer.decode(token_ids, skip_special_tokens=False) == library.decode(token_ids), text
            detokenizer = Detokenizer(tokenizer)
            streamed = "".join(map(detokenizer.feed, token_ids)) + detokenizer.flush()
            assert streamed in (library.decode(token_ids), " " + library.decode(token_ids)), text


def test_what_the_model_says_of_itself(llama: bytes, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write(tmp_path, llama))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert (tokenizer.special_token_ids, tokenizer.eos_token_ids) == ({0, 1, 2}, (2,))
    assert tokenizer.encode("hello", add_special_tokens=True)[0] == 1
    assert tokenizer.vocab_size == 560
    without = Tokenizer.from_directory(write(tmp_path, llama, add_bos_token=False, add_eos_token=True))
    assert without.encode("hello", add_special_tokens=True) == [*without.encode("hello", add_special_tokens=False), 2]


@pytest.mark.parametrize(("legacy", "between"), [(True, "<s>▁a</s>▁b"), (False, "<s>a</s>b")])
def test_control_tokens_and_the_space_behind_them(llama: bytes, tmp_path: Path, legacy: bool, between: str) -> None:
    tokenizer = Tokenizer.from_directory(write(tmp_path, llama, legacy=legacy))
    model = SentencePieceModel.read(tmp_path / "tokenizer.model")
    token_ids = tokenizer.encode("<s>a</s>b", add_special_tokens=False)
    assert "".join(model.pieces[token_id].text for token_id in token_ids) == between


def test_older_companions_name_the_added_tokens(llama: bytes, tmp_path: Path) -> None:
    write(tmp_path, llama)
    (tmp_path / "added_tokens.json").write_text('{"<pad>": 561, "<|im_end|>": 560}', encoding="utf-8")
    special = {"pad_token": "<pad>", "eos_token": {"content": "<|im_end|>", "lstrip": False}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special), encoding="utf-8")
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("<|im_end|><pad>", add_special_tokens=False) == [560, 561]
    assert (tokenizer.eos_token_ids, tokenizer.special_token_ids) == ((560,), {0, 1, 2, 560, 561})
    (tmp_path / "added_tokens.json").write_text('{"<pad>": 570}', encoding="utf-8")
    with pytest.raises(ModelLoadError, match="'<pad>' is listed with the id 570, but has 560"):
        Tokenizer.from_directory(tmp_path)


def test_placeholders_take_their_listed_names(llama: bytes, tmp_path: Path) -> None:
    listed = {"5": {"content": "<|tool|>", "special": True}}
    tokenizer = Tokenizer.from_directory(write(tmp_path, llama, added_tokens_decoder=listed))
    assert tokenizer.encode("<|tool|>", add_special_tokens=False) == [5]
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json is not a usable tokenizer"):
        Tokenizer.from_directory(write(tmp_path, llama, added_tokens_decoder={"five": "a"}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_type": "word"}, "its kind is word; bpe and unigram are supported"),
        ({"model_type": "char"}, "its kind is char"),
        ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
    ],
)
def test_what_would_be_approximated_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    data = train(**{"model_type": "unigram", "vocab_size": 200, "hard_vocab_limit": False, **options})
    with pytest.raises(ModelLoadError, match=message):
        Tokenizer.from_directory(write(tmp_path, data))


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"\xff" * 100, b"\x0a\x7fabc", b"not a model", b"\x0a\x02\x0a\x00"])
def test_something_else_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.model is not a usable SentencePiece model .*download"):
        Tokenizer.from_directory(write(tmp_path, data))


def test_a_tiktoken_vocabulary_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="is a tiktoken vocabulary"):
        Tokenizer.from_directory(write(tmp_path, b"IQ== 0\nIg== 1\n"))


def test_a_damaged_model_is_refused_or_read_and_never_more(tmp_path: Path, llama: bytes) -> None:
    """Every short prefix, and single changed bytes, as in a broken download."""
    rng = random.Random(1)
    damaged = [llama[: rng.randrange(len(llama))] for _ in range(40)]
    for _ in range(120):
        place = rng.randrange(len(llama))
        damaged.append(llama[:place] + bytes([rng.randrange(256)]) + llama[place + 1 :])
    num_refused = 0
    for data in damaged:
        try:
            tokenizer = Tokenizer.from_directory(write(tmp_path, data))
        except ModelLoadError:
            num_refused += 1
        else:
            tokenizer.encode("hello 你好", add_special_tokens=True)
    assert num_refused > 40


def test_damaged_rules_of_normalisation_never_end_the_process(tmp_path: Path) -> None:
    data, rng = train(**KINDS["unigram"]), random.Random(2)
    write(tmp_path, data)
    rules = SentencePieceModel.read(tmp_path / "tokenizer.model").charsmap
    start, num_refused = data.index(rules), 0
    for trial in range(24):
        damaged = bytearray(data)
        for _ in range(rng.choice([1, 3, 30])):
            damaged[start + rng.randrange(2000 if trial % 2 else len(rules))] = rng.randrange(256)
        try:
            tokenizer = Tokenizer.from_directory(write(tmp_path, bytes(damaged)))
        except ModelLoadError as error:
            num_refused += "rules of normalisation" in str(error)
        else:
            for text in HOSTILE:
                tokenizer.encode(text, add_special_tokens=False)
    assert num_refused > 6


def test_damaged_rules_in_a_tokenizer_json_are_refused(tmp_path: Path) -> None:
    write(tmp_path, train(**KINDS["unigram"]))
    rules = bytearray(SentencePieceModel.read(tmp_path / "tokenizer.model").charsmap)
    rules[4:8] = b"\xff\xff\xff\x7f"
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Precompiled(bytes(rules))])
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelLoadError, match=r"unit 0 leads out of the table"):
        Tokenizer.from_directory(tmp_path)


def test_rules_of_normalisation_with_a_long_replacement_are_refused() -> None:
    table = bytes(1024)
    assert charsmap_damage(struct.pack("<I", 1024) + table + b"\0" + b"x" * 128 + b"\0") == ""
    damage = charsmap_damage(struct.pack("<I", 1024) + table + b"\0" + b"x" * 129 + b"\0")
    assert damage == "a replacement has 129 bytes, more than 128"
