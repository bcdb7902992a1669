"""Tokenizers of encoders from GGUF metadata give the ids of transformers' tokenizers with the same vocabularies."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import sentencepiece
import tokenizers
import transformers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from pagewick.errors import ModelLoadError
from pagewick.text.gguf_tokenizer import gguf_tokenizer
from pagewick.text.sentencepiece_model import SentencePieceModel
from pagewick.text.tokenizer import Tokenizer
from pagewick.text.tokenizer_files import apply_config
from tests.text.tokenizers.hostile import CORPUS, HOSTILE, random_texts
from tests.text.tokenizers.test_sentencepiece_model import train
from tests.weights.gguf.encoder_vocabularies import byte_level_values, unigram_values, word_piece_values

TEXTS = [
    *HOSTILE,
    *random_texts(150),
    "Crème BRÛLÉE Ångström İstanbul ǅungla ß ẞ ΣΊΣΥΦΟΣ",
    "한국어 각 \u1112\u1161\u11ab",
    "漢字かなカナ。、！？\u3000全角ＡＢＣ",
    "a\u0000b\ufffdc\u200bd\u00ade\x07f\x1bg\u2028h\u0085i",
    "x" * 101,
    "y" * 100,
    "[SEP] [sep] a[CLS]b [MASK]c </s> <mask>d  <mask> e",
    "nai\u0308ve e\u0301\u0327 \u093f\u0902",
    "$1,000 @user ~x^2 §5 ©",
]
BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


@functools.cache
def bert(*, folds_case: bool, strips_accents: bool | None = None) -> tokenizers.Tokenizer:
    """transformers' tokenizer of BERT."""
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=folds_case)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=BERT, show_progress=False)
    )
    vocab = made.get_vocab()
    return transformers.BertTokenizer(vocab, folds_case, strip_accents=strips_accents)._tokenizer


@functools.cache
def byte_level(kind: str) -> tokenizers.Tokenizer:
    """transformers' tokenizer of RoBERTa, or one as the files of ModernBERT have it."""
    special = ROBERTA if kind == "roberta" else BERT
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=450, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    if kind == "roberta":
        merges = [tuple(pair) for pair in json.loads(made.to_str())["model"]["merges"]]
        mask = AddedToken("<mask>", lstrip=True)
        return transformers.RobertaTokenizer(made.get_vocab(), merges, mask_token=mask)._tokenizer
    found = tokenizers.Tokenizer(made.model)
    found.normalizer = normalizers.NFC()
    found.pre_tokenizer, found.decoder = made.pre_tokenizer, decoders.ByteLevel()
    found.add_special_tokens([AddedToken(token, normalized=False, lstrip=token == "[MASK]") for token in BERT])
    found.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, found.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    return found


@pytest.fixture(scope="module")
def xlm_roberta(tmp_path_factory: pytest.TempPathFactory) -> tokenizers.Tokenizer:
    """transformers' tokenizer of XLM-RoBERTa, with pieces and rules of the sentencepiece library."""
    file = tmp_path_factory.mktemp("unigrams") / "tokenizer.model"
    file.write_bytes(train(model_type="unigram", vocab_size=150, normalization_rule_name="nmt_nfkc"))
    library = sentencepiece.SentencePieceProcessor(model_file=str(file))
    pieces = [(library.id_to_piece(i), library.get_score(i)) for i in range(3, library.vocab_size())]
    vocab = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *pieces, ("<mask>", 0.0)]
    rules = SentencePieceModel.read(file).charsmap
    mask = AddedToken("<mask>", lstrip=True)
    return transformers.XLMRobertaTokenizer(vocab, mask_token=mask, _spm_precompiled_charsmap=rules)._tokenizer  # type: ignore[arg-type]


def read(values: dict[str, Any]) -> tokenizers.Tokenizer:
    backend, config = gguf_tokenizer(values, "m.gguf")
    apply_config(backend, config)
    return backend


def changed(values: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Return the key-values with others in place of some; those that are None are left out."""
    found = {**values, **{f"tokenizer.ggml.{key}": value for key, value in change.items()}}
    return {key: value for key, value in found.items() if value is not None}


def assert_same(ours: tokenizers.Tokenizer, theirs: tokenizers.Tokenizer, texts: Sequence[str] = TEXTS) -> None:
    for text in texts:
        found, expected = ours.encode(text), theirs.encode(text)
        assert found.ids == expected.ids, (text, found.tokens, expected.tokens)
        found, expected = ours.encode("hello", text), theirs.encode("hello", text)
        assert (found.ids, found.type_ids) == (expected.ids, expected.type_ids), text
        assert ours.decode(found.ids) == theirs.decode(found.ids), text


@pytest.mark.parametrize("says_so", [True, False])
@pytest.mark.parametrize("folds_case", [True, False])
def test_ids_are_those_of_bert(folds_case: bool, says_so: bool) -> None:
    theirs = bert(folds_case=folds_case)
    flags = {"normalizer.lowercase": folds_case} if says_so else {}
    # Older files do not say whether case counts: their vocabularies have capitals or none.
    assert_same(read(word_piece_values(theirs, **flags)), theirs)


def test_accents_may_stay_without_case() -> None:
    theirs = bert(folds_case=True, strips_accents=False)
    flags = {"normalizer.lowercase": True, "normalizer.strip_accents": False}
    assert_same(read(word_piece_values(theirs, **flags)), theirs)


def test_older_files_leave_names_in_brackets_as_they_are_and_some_keys_out() -> None:
    theirs = bert(folds_case=True)
    values = word_piece_values(theirs, vocab_size=310)
    tokens = values["tokenizer.ggml.tokens"]
    tokens[300:] = [f"[unused{token_id}]" for token_id in range(300, len(tokens))]
    values["tokenizer.ggml.token_type"][300:] = [1] * (len(tokens) - 300)
    for key in ("cls", "seperator", "unknown"):
        del values[f"tokenizer.ggml.{key}_token_id"]
    ours = read(values)
    assert_same(ours, theirs)
    assert ours.id_to_token(305) == "[unused305]"


def test_ids_are_those_of_xlm_roberta(xlm_roberta: tokenizers.Tokenizer) -> None:
    assert_same(read(unigram_values(xlm_roberta)), xlm_roberta)
    # Converters take this from a setting about decoding, and write the bytes of the rules with a sign, too.
    values = unigram_values(xlm_roberta, remove_extra_whitespaces=False)
    rules = "tokenizer.ggml.precompiled_charsmap"
    values[rules] = [number - 256 if number > 127 else number for number in values[rules]]
    assert_same(read(values), xlm_roberta)


def test_files_that_were_converted_from_sentencepiece_lack_the_mask_token(xlm_roberta: tokenizers.Tokenizer) -> None:
    values = unigram_values(xlm_roberta)
    mask = values["tokenizer.ggml.mask_token_id"]
    values["tokenizer.ggml.tokens"][mask] = f"[PAD{mask - 1}]"
    values["tokenizer.ggml.token_type"][mask] = 5
    for key in ("cls_token_id", "unknown_token_id", "add_bos_token", "add_eos_token"):
        del values[f"tokenizer.ggml.{key}"]
    assert_same(read(values), xlm_roberta)


def test_ids_are_those_of_roberta() -> None:
    theirs = byte_level("roberta")
    values = byte_level_values(theirs, "roberta-bpe")
    assert_same(read({"general.architecture": "bert", **values}), theirs)


def test_ids_are_those_of_modernbert() -> None:
    theirs = byte_level("modernbert")
    values = byte_level_values(theirs, "modern-bert")
    assert_same(read({"general.architecture": "modern-bert", **values}), theirs)


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_text_of_a_pair_is_no_control_token(kind: str, xlm_roberta: tokenizers.Tokenizer) -> None:
    values = word_piece_values(bert(folds_case=True)) if kind == "bert" else unigram_values(xlm_roberta)
    backend, config = gguf_tokenizer(values, "m.gguf")
    tokenizer = Tokenizer(backend, config=config)
    before, between, behind = tokenizer.pair_edges
    tokens = [[backend.id_to_token(token_id) for token_id in ids] for ids in (before, between, behind)]
    if kind == "bert":
        assert tokens == [["[CLS]"], ["[SEP]"], ["[SEP]"]]
    else:
        assert tokens == [["<s>"], ["</s>", "</s>"], ["</s>"]]
    assert not tokenizer.eos_token_ids or tokenizer.eos_token == "</s>"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"cls_token_id": 10**6, "tokens": ["a", "[UNK]"], "token_type": [1, 3]}, "which token stands around texts"),
        ({"unknown_token_id": None, "tokens": ["a"], "token_type": [1]}, "no token for unknown words"),
        ({"tokens": ["\u2581\u2581a", "\u2581\u2581b", "[UNK]"], "token_type": [1, 1, 3]}, "a tokenizer of SentenceP"),
        ({"normalizer.lowercase": "yes"}, "normalizer.lowercase must be bool"),
    ],
)
def test_an_unusable_vocabulary_of_word_pieces_is_refused(change: dict[str, Any], complaint: str) -> None:
    values = word_piece_values(bert(folds_case=True)) | {
        f"tokenizer.ggml.{key}": value for key, value in change.items()
    }
    with pytest.raises(ModelLoadError, match=complaint):
        gguf_tokenizer({key: value for key, value in values.items() if value is not None}, "m.gguf")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"scores": [1.0]}, "no score for each"),
        ({"scores": None}, "no score for each"),
        ({"precompiled_charsmap": [1, 2, 3]}, "is not a usable tokenizer .*precompiled_charsmap"),
        ({"precompiled_charsmap": "x"}, "must be list"),
        ({"bos_token_id": None, "cls_token_id": None}, "which token stands around texts"),
    ],
)
def test_an_unusable_vocabulary_of_unigrams_is_refused(
    change: dict[str, Any], complaint: str, xlm_roberta: tokenizers.Tokenizer
) -> None:
    with pytest.raises(ModelLoadError, match=complaint):
        gguf_tokenizer(changed(unigram_values(xlm_roberta), change), "m.gguf")


def test_a_tokenizer_of_text_says_nothing_about_pairs() -> None:
    values = byte_level_values(byte_level("roberta"), "gpt-2", cls_token_id=None, add_bos_token=False)
    backend, config = gguf_tokenizer({"general.architecture": "qwen2", **values}, "m.gguf")
    assert backend.post_processor is None and config["add_eos_token"]
