"""Tokenizers of encoders from a GGUF file's metadata: WordPiece, unigrams of XLM-RoBERTa, and tokens around texts.

Token ids are those of the models' own tokenizers. llama.cpp differs from them: it cuts words of more than 100
characters into pieces, too, and composes no letters and marks for ModernBERT.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from pagewick.errors import ModelLoadError
from pagewick.text.guarded import guarded
from pagewick.text.sentencepiece_model import charsmap_damage
from pagewick.weights.gguf.vocabulary import TokenType, token_id_of, vocabulary_value

FIX: Final = "use another GGUF file of this model, or give a tokenizer with --tokenizer"
# Architectures whose tokens around texts do not depend on the flags of the file, which older converters leave out.
_ENCODERS: Final = ("bert", "nomic-bert", "modern-bert")
_WORD_PIECE, _UNIGRAM = "bert", "t5"
# The converter marks the pieces that begin a word, and WordPiece those that do not.
_BEGIN, _CONTINUATION = "\u2581", "##"
# Older files have such tokens without a mark: [CLS], [unused7].
_BRACKETED: Final = re.compile(r"\[.+\]")
_CAPITAL: Final = re.compile("[A-Z]")
# A longer word is one unknown token; BERT's own limit.
_MAX_WORD_CHARS: Final = 100
# Converters of SentencePiece files leave out the mask token.
_MASK: Final = "<mask>"


def is_encoder(values: Mapping[str, Any], kind: str | None) -> bool:
    """Whether a tokenizer is one of an encoder, with tokens around texts and pairs. kind: tokenizer.ggml.model."""
    return kind in (_WORD_PIECE, _UNIGRAM) or values.get("general.architecture") in _ENCODERS


def word_pieces(
    values: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], where: str
) -> tuple[tokenizers.Tokenizer, list[str]]:
    """Make the tokenizer of a file in which tokenizer.ggml.model is bert. Also returns the names of its tokens.

    Raises ModelLoadError for a vocabulary that cannot be WordPiece.
    """
    names = [_name_of(token, kind) for token, kind in zip(tokens, types, strict=True)]
    begun_twice = sum(token.startswith(2 * _BEGIN) for token in tokens)
    if 10 * begun_twice > len(tokens):
        raise ModelLoadError(
            f"{where} has a tokenizer of SentencePiece that was written as one of BERT, as older converters do with "
            f"CamemBERT\n  {FIX}"
        )
    unknown = names[found] if (found := token_id_of(values, "unknown_token_id", names)) is not None else "[UNK]"
    if unknown not in names:
        raise ModelLoadError(f"{where} has no token for unknown words, tokenizer.ggml.unknown_token_id\n  {FIX}")
    folds = vocabulary_value(values, "normalizer.lowercase", bool)
    if folds is None:
        # Older files do not say. A vocabulary without capitals was made from texts without them.
        folds = not any(
            kind == TokenType.NORMAL and _CAPITAL.search(name) and not _BRACKETED.fullmatch(name)
            for name, kind in zip(names, types, strict=True)
        )
    strips = vocabulary_value(values, "normalizer.strip_accents", bool, folds)
    vocabulary = {name: token_id for token_id, name in enumerate(names)}
    model = guarded(
        lambda: models.WordPiece(vocabulary, unk_token=unknown, max_input_chars_per_word=_MAX_WORD_CHARS), where
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(lowercase=folds, strip_accents=strips)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix=_CONTINUATION)
    backend.add_tokens(added_tokens(names, types))
    return backend, names


def _name_of(token: str, kind: int) -> str:
    """Return a token's name in the model's own vocabulary."""
    if kind == TokenType.CONTROL or _BRACKETED.fullmatch(token):
        return token
    return token[len(_BEGIN) :] if token.startswith(_BEGIN) else f"{_CONTINUATION}{token}"


def unigrams(
    values: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], where: str
) -> tuple[tokenizers.Tokenizer, list[str]]:
    """Make the tokenizer of a file in which tokenizer.ggml.model is t5. Also returns the names of its tokens.

    Words are split at spaces as XLM-RoBERTa's are, whatever tokenizer.ggml.remove_extra_whitespaces says: converters
    take it from a setting that is about decoding. Raises ModelLoadError for missing scores and malformed rules.
    """
    scores = vocabulary_value(values, "scores", list)
    if scores is None or len(scores) != len(tokens):
        raise ModelLoadError(f"{where} has no score for each of its {len(tokens)} tokens\n  {FIX}")
    names, kinds = list(tokens), list(types)
    mask = token_id_of(values, "mask_token_id", names)
    if mask is not None and kinds[mask] == TokenType.UNUSED and _MASK not in names:
        names[mask], kinds[mask] = _MASK, TokenType.CONTROL
    unknown = token_id_of(values, "unknown_token_id", names)
    if unknown is None:
        unknown = next((token_id for token_id, kind in enumerate(kinds) if kind == TokenType.UNKNOWN), None)
    scored = list(zip(names, scores, strict=True))
    has_bytes = any(kind == TokenType.BYTE for kind in kinds)
    backend = tokenizers.Tokenizer(
        guarded(lambda: models.Unigram(scored, unk_id=unknown, byte_fallback=has_bytes), where)
    )
    if rules := vocabulary_value(values, "precompiled_charsmap", list):
        backend.normalizer = guarded(lambda: _charsmap(rules), where)
    scheme = "always" if vocabulary_value(values, "add_space_prefix", bool, True) else "never"
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement=_BEGIN, prepend_scheme=scheme)]
    )
    backend.decoder = decoders.Metaspace(replacement=_BEGIN, prepend_scheme=scheme)
    backend.add_tokens(added_tokens(names, kinds))
    return backend, names


def _charsmap(rules: Sequence[int]) -> normalizers.Normalizer:
    # Converters have written the bytes with a sign, too.
    charsmap = bytes(number % 256 for number in rules)
    if damage := charsmap_damage(charsmap):
        raise ValueError(f"tokenizer.ggml.precompiled_charsmap: {damage}")
    return normalizers.Precompiled(charsmap)


def added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[AddedToken]:
    """Return the tokens that are found in a text before it is split."""
    added = {TokenType.CONTROL: True, TokenType.USER_DEFINED: False, TokenType.UNKNOWN: True}
    return [
        AddedToken(token, normalized=False, special=added[TokenType(kind)])
        for token, kind in zip(tokens, types, strict=True)
        if kind in added and token
    ]


def edge_entries(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the entries of tokenizer_config.json that differ for an encoder, of which no file has the flags.

    The mask token takes the space before it, except in vocabularies of WordPiece.
    """
    entries: dict[str, Any] = {"add_bos_token": False, "add_eos_token": False}
    if kind != _WORD_PIECE and "mask_token" in config:
        entries["mask_token"] = {"content": config["mask_token"], "lstrip": True, "normalized": False}
    return entries


def add_edges(
    backend: tokenizers.Tokenizer, values: Mapping[str, Any], kind: str, tokens: Sequence[str], where: str
) -> None:
    """Make the tokenizer add the tokens around a text, and around and between the two of a pair.

    RoBERTa and XLM-RoBERTa have two tokens between them. tokens: their names. Raises ModelLoadError if the file does
    not name the tokens.
    """
    edges = []
    for keys, name in ((("cls_token_id", "bos_token_id"), "[CLS]"), (("seperator_token_id", "eos_token_id"), "[SEP]")):
        known = [found for key in keys if (found := token_id_of(values, key, tokens)) is not None]
        token_id = known[0] if known else backend.token_to_id(name)
        if token_id is None:
            problem = f"does not say which token stands around texts, tokenizer.ggml.{keys[0]}"
            raise ModelLoadError(f"{where} {problem}\n  {FIX}")
        edges.append((tokens[token_id], token_id))
    first, last = edges
    is_doubled = kind == _UNIGRAM or (kind == "gpt2" and values.get("general.architecture") != "modern-bert")
    make = processors.RobertaProcessing if is_doubled else processors.BertProcessing
    backend.post_processor = make(last, first)
