"""The tokenizer and the chat template in a GGUF file's metadata.

Token ids are those of llama.cpp, except where the model's own tokenizer differs from it (pre_tokenizers.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from pagewick.errors import ModelLoadError
from pagewick.text.gguf_encoder_tokenizer import (
    FIX,
    add_edges,
    added_tokens,
    edge_entries,
    is_encoder,
    unigrams,
    word_pieces,
)
from pagewick.text.guarded import guarded
from pagewick.text.pre_tokenizers import ENCODER_PRE_TOKENIZERS, PRE_TOKENIZERS
from pagewick.text.sentencepiece_backend import make_backend
from pagewick.text.sentencepiece_model import Piece, PieceType, SentencePieceModel
from pagewick.weights.gguf.vocabulary import token_id_of, token_types, vocabulary_value

TEMPLATE: Final = "tokenizer.chat_template"
# Key of the metadata -> entry of tokenizer_config.json.
SPECIAL_TOKENS: Final = {
    "bos_token_id": "bos_token",
    "eos_token_id": "eos_token",
    "unknown_token_id": "unk_token",
    "seperator_token_id": "sep_token",
    "padding_token_id": "pad_token",
    "cls_token_id": "cls_token",
    "mask_token_id": "mask_token",
}
_KINDS: Final = ("gpt2", "llama", "gemma4", "bert", "t5")
_SPACE: Final = "\u2581"


def gguf_tokenizer(values: Mapping[str, Any], where: str) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Make the tokenizer that a file's key-values describe, and its configuration as in tokenizer_config.json.

    where: the file, for messages. Raises ModelLoadError for a vocabulary that is malformed or of an unknown kind.
    """
    kind = vocabulary_value(values, "model", str)
    tokens: list[str] = vocabulary_value(values, "tokens", list) or []
    if kind not in _KINDS or not tokens:
        problem = f"has a tokenizer of the kind {kind!r}, which is not supported" if tokens else "has no vocabulary"
        raise ModelLoadError(f"{where} {problem}\n  {FIX}")
    types = token_types(values, len(tokens))
    if kind in ("bert", "t5"):
        backend, tokens = (word_pieces if kind == "bert" else unigrams)(values, tokens, types, where)
        adds_bos = False
    elif kind == "gpt2":
        backend, adds_bos = _byte_level(values, tokens, types, where)
    elif kind == "gemma4":
        backend, adds_bos = _merged_characters(values, tokens, types, where), True
    else:
        backend, adds_bos = _sentencepiece(values, tokens, types, where), True
    config: dict[str, Any] = {
        "add_bos_token": vocabulary_value(values, "add_bos_token", bool, adds_bos),
        "add_eos_token": vocabulary_value(values, "add_eos_token", bool, False),
    }
    for key, name in SPECIAL_TOKENS.items():
        if (token_id := token_id_of(values, key, tokens)) is not None:
            config[name] = tokens[token_id]
    if is_encoder(values, kind):
        add_edges(backend, values, kind, tokens, where)
        config |= edge_entries(config, kind)
    if config.get("bos_token") is None:
        config["add_bos_token"] = False
    if templates := gguf_templates(values):
        config["chat_template"] = templates
    return backend, config


def _byte_level(
    values: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], where: str
) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte pair encoding of bytes, as GPT-2 has it. Also returns whether such a vocabulary usually begins with BOS."""
    name = vocabulary_value(values, "pre", str, "default")
    splitting = PRE_TOKENIZERS.get(name) or ENCODER_PRE_TOKENIZERS.get(name)
    if splitting is None:
        raise ModelLoadError(f"{where} splits text in the way {name!r}, which is not supported\n  {FIX}")
    merges = _merges(values, where)
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    ignores_merges = splitting.ignores_merges
    model = guarded(lambda: models.BPE(vocabulary, [*map(_pair, merges)], ignore_merges=ignores_merges), where)
    backend = tokenizers.Tokenizer(model)
    if splitting.normalizer is not None:
        backend.normalizer = splitting.normalizer
    backend.pre_tokenizer = splitting.make()
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(added_tokens(tokens, types))
    return backend, splitting.begins_with_bos


def _merged_characters(
    values: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], where: str
) -> tokenizers.Tokenizer:
    """Byte pair encoding of characters, as Gemma 4 has it: spaces are another character, and there are no words."""
    merges = _merges(values, where)
    unknown = vocabulary_value(values, "unknown_token_id", int)
    model = guarded(
        lambda: models.BPE(
            {token: token_id for token_id, token in enumerate(tokens)},
            [*map(_pair, merges)],
            unk_token=tokens[unknown] if unknown is not None and 0 <= unknown < len(tokens) else None,
            fuse_unk=True,
            byte_fallback=True,
        ),
        where,
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", _SPACE)
    backend.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    # A run of line breaks is one token, if there is one, whatever the merges.
    breaks = [AddedToken(token, normalized=False) for token in tokens if token and not token.strip("\n")]
    backend.add_tokens([*added_tokens(tokens, types), *breaks])
    return backend


def _merges(values: Mapping[str, Any], where: str) -> list[str]:
    merges = vocabulary_value(values, "merges", list)
    if merges is None:
        raise ModelLoadError(f"{where} has no tokenizer.ggml.merges\n  {FIX}")
    return list(merges)


def _pair(merge: str) -> tuple[str, str]:
    first, separator, second = merge.partition(" ") if not merge.startswith(" ") else (" ", " ", merge[2:])
    if not separator or not second:
        raise ValueError(f"{merge!r} is no pair")
    return first, second


def _sentencepiece(
    values: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], where: str
) -> tokenizers.Tokenizer:
    scores = vocabulary_value(values, "scores", list)
    if scores is None or len(scores) != len(tokens):
        raise ModelLoadError(f"{where} has no score for each of its {len(tokens)} tokens\n  {FIX}")
    kinds = set(map(int, PieceType))
    pieces = tuple(
        Piece(token, score, PieceType(kind) if kind in kinds else PieceType.NORMAL)
        for token, score, kind in zip(tokens, scores, types, strict=True)
    )
    unknown = vocabulary_value(values, "unknown_token_id", int, 0)
    model = SentencePieceModel(
        pieces=pieces,
        is_unigram=False,
        has_byte_fallback=any(piece.type is PieceType.BYTE for piece in pieces),
        unk_id=unknown if 0 <= unknown < len(pieces) else 0,
        bos_id=vocabulary_value(values, "bos_token_id", int),
        eos_id=vocabulary_value(values, "eos_token_id", int),
        charsmap=b"",
        adds_dummy_prefix=vocabulary_value(values, "add_space_prefix", bool, True),
        removes_extra_whitespaces=vocabulary_value(values, "remove_extra_whitespaces", bool, False),
    )
    # llama.cpp adds the space after each special token, too.
    return guarded(lambda: make_backend(model, is_legacy=True, adds_prefix_space=model.adds_dummy_prefix), where)


def gguf_templates(values: Mapping[str, Any]) -> list[dict[str, str]]:
    """The chat templates by name, as tokenizer_config.json lists them."""
    found = []
    for key in values:
        if (key == TEMPLATE or key.startswith(f"{TEMPLATE}.")) and isinstance(values[key], str):
            found.append({"name": key.removeprefix(TEMPLATE).lstrip(".") or "default", "template": values[key]})
    return found
