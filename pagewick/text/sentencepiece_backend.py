"""Converts a SentencePiece model to a `tokenizers.Tokenizer`, as transformers does for tokenizer.json.

The ids are those of the sentencepiece library, except where transformers differs: control tokens and user-defined
pieces are recognised in the text (`<s>` is one token), and with `is_legacy` a space is also added after each of them,
not only before the text. Two more differences of transformers are kept, which affect no language model served here:
rules of Unicode normalisation do not always join marks with the letter before them, and a unigram vocabulary
recognises the names of its byte pieces (`<0x41>`) in a text.
"""

from __future__ import annotations

import re

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from pagewick.text.sentencepiece_model import PieceType, SentencePieceModel

_SPACE = "\u2581"


def make_backend(model: SentencePieceModel, *, is_legacy: bool, adds_prefix_space: bool) -> tokenizers.Tokenizer:
    """Make the tokenizer of a model.

    is_legacy: add a space before each text between two special tokens, not only before the whole text, as the prompts
    of Llama 1 and 2 expect. adds_prefix_space: from tokenizer_config.json, else from the model.
    """
    defined = [piece.text for piece in model.pieces if piece.type is PieceType.USER_DEFINED]
    # Spaces are replaced before the lookup in the vocabulary, also in user-defined pieces that consist of spaces.
    inner = [text for text in defined if _SPACE in text or not text.strip()]
    if model.is_unigram:
        scored = [(piece.text, piece.score) for piece in model.pieces]
        backend = tokenizers.Tokenizer(
            models.Unigram(scored, unk_id=model.unk_id, byte_fallback=model.has_byte_fallback)
        )
    else:
        bpe = models.BPE(
            {piece.text: index for index, piece in enumerate(model.pieces)},
            _merges(model),
            unk_token=model.pieces[model.unk_id].text,
            fuse_unk=True,
            byte_fallback=model.has_byte_fallback,
            ignore_merges=bool(inner),  # the text is split into words, some of which no merges produce
        )
        backend = tokenizers.Tokenizer(bpe)
    is_prepended = adds_prefix_space and (is_legacy or model.removes_extra_whitespaces)
    backend.normalizer = normalizers.Sequence(_normalizers(model, is_prepended=is_prepended))
    splits: list[pre_tokenizers.PreTokenizer] = []
    if adds_prefix_space and not is_prepended:
        # A Metaspace adds no space before its own replacement character. The first one looks for " ", which the
        # normalizer has already replaced everywhere, so that it always adds a space.
        splits.append(pre_tokenizers.Metaspace(replacement=" ", prepend_scheme="first", split=False))
        splits.append(pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="never", split=False))
    if inner:
        longest_first = sorted(inner, key=len, reverse=True)
        splits.append(pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), "isolated"))
    if splits:
        backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if adds_prefix_space:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    special = (PieceType.UNKNOWN, PieceType.CONTROL)
    added = [
        AddedToken(piece.text, normalized=False, special=piece.type in special)
        for piece in model.pieces
        if piece.type in special or (piece.type is PieceType.USER_DEFINED and piece.text not in inner)
    ]
    backend.add_tokens(added)
    return backend


def _merges(model: SentencePieceModel) -> list[tuple[str, str]]:
    """Return all pairs of pieces that form a piece, in the order in which they are merged.

    The library merges the pair that forms the piece with the highest score; among equals, the leftmost in the text.
    """
    scores = {
        piece.text: piece.score
        for piece in model.pieces
        if piece.type in (PieceType.NORMAL, PieceType.USER_DEFINED) and piece.text
    }
    ranked = [
        (-score, -cut, whole[:cut], whole[cut:])
        for whole, score in scores.items()
        for cut in range(1, len(whole))
        if whole[:cut] in scores and whole[cut:] in scores
    ]
    ranked.sort()
    return [(left, right) for _, _, left, right in ranked]


def _normalizers(model: SentencePieceModel, *, is_prepended: bool) -> list[normalizers.Normalizer]:
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.removes_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    steps.append(normalizers.Replace(" ", _SPACE))
    if model.removes_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(f"{_SPACE}+\\z"), ""))
    if is_prepended:
        steps.append(normalizers.Prepend(_SPACE))
    return steps
