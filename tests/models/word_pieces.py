"""Tiny tokenizers of encoders: BERT's word pieces and XLM-RoBERTa's unigrams, with tokens around texts and pairs."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "What is the capital of China?", "The capital of China is Beijing.", "Gravity is a force, isn't it?",
    "Crème brûlée costs 12.50 €.", "你好 世界", "the the the [SEP] a [CLS]", "Unaffordable unhappiness!",
]  # fmt: skip
_WORD_PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_UNIGRAMS = ["<s>", "<pad>", "</s>", "<unk>"]


@functools.cache
def word_pieces(vocab_size: int = 180) -> tokenizers.Tokenizer:
    """Like bert-base-uncased. The training is not the same every time: a process has one such tokenizer."""
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=_WORD_PIECES, show_progress=False)
    made.train_from_iterator(TEXTS * 20, trainer)
    edges = [(token, made.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=edges
    )
    return made


@functools.cache
def unigrams(vocab_size: int = 180) -> tokenizers.Tokenizer:
    """Like xlm-roberta-base."""
    made = tokenizers.Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=_UNIGRAMS, unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(TEXTS * 20, trainer)
    made.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    edges = [(token, made.token_to_id(token)) for token in ("<s>", "</s>")]
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=edges
    )
    return made


def write_tokenizer(made: tokenizers.Tokenizer, directory: Path) -> None:
    made.save(str(directory / "tokenizer.json"))
    names = _WORD_PIECES if made.token_to_id("[CLS]") is not None else _UNIGRAMS
    roles = dict(zip(("pad", "unk", "cls", "sep"), names, strict=False))
    if names is _UNIGRAMS:
        roles = {"cls": "<s>", "bos": "<s>", "pad": "<pad>", "sep": "</s>", "eos": "</s>", "unk": "<unk>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **{f"{role}_token": text for role, text in roles.items()}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
