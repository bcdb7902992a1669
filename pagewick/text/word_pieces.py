"""BERT's vocab.txt: a file of word pieces, one in each line, which older checkpoints have in place of tokenizer.json.

tokenizer_config.json says how texts are normalised; the defaults are those of transformers' BertTokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from pagewick.errors import ModelLoadError

VOCABULARY_FILE: Final = "vocab.txt"
# Classes with these rules; the class may be left out.
_CLASSES: Final = ("", "BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer")
# Entry of tokenizer_config.json -> attribute of the library's BertNormalizer.
_OPTIONS: Final = {
    "do_lower_case": "lowercase", "strip_accents": "strip_accents", "tokenize_chinese_chars": "handle_chinese_chars",
}  # fmt: skip
_SPECIAL: Final = {
    "unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]",
}  # fmt: skip


def read_word_pieces(file: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    """Make a tokenizer of a vocab.txt. Also adds to `config` the roles of tokens that it leaves open.

    config: the content of tokenizer_config.json. Raises ModelLoadError for one of another kind of tokenizer, and for a
    vocabulary that lacks the tokens around a text.
    """
    name = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    if name not in _CLASSES:
        raise ModelLoadError(
            f"{file} is of a {name}, whose rules are not known\n  use a model that has a tokenizer.json, or write it "
            f'with transformers: AutoTokenizer.from_pretrained("{file.parent}").save_pretrained("{file.parent}")'
        )
    for role, token in _SPECIAL.items():
        config.setdefault(role, token)
    vocabulary = _read(file)
    roles = {role: _text(config[role]) for role in _SPECIAL}
    if missing := [roles[role] for role in ("unk_token", "sep_token", "cls_token") if roles[role] not in vocabulary]:
        raise ModelLoadError(f"{file} has no token {missing[0]}; download the model again")
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=roles["unk_token"]))
    lowercase = config.get("do_lower_case") is not False
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase,
        strip_accents=_flag(config, "strip_accents", lowercase),
        handle_chinese_chars=_flag(config, "tokenize_chinese_chars", True),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in roles.values() if token in vocabulary]
    )
    start, end = roles["cls_token"], roles["sep_token"]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}",
        pair=f"{start} $A {end} $B:1 {end}:1",
        special_tokens=[(token, vocabulary[token]) for token in (start, end)],
    )
    return backend


def set_normalizer(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Normalise as tokenizer_config.json says, where it contradicts tokenizer.json: transformers lets it win."""
    name = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    if name not in _CLASSES[1:] or not isinstance(backend.normalizer, normalizers.BertNormalizer):
        return
    for option, attribute in _OPTIONS.items():
        if isinstance(value := config.get(option), bool):
            setattr(backend.normalizer, attribute, value)


def _read(file: Path) -> dict[str, int]:
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except ValueError as error:
        raise ModelLoadError(f"{file} is not a text in UTF-8 ({error}); download the model again") from None
    # The last line may have a line break behind it.
    pieces = lines[:-1] if lines[-1] == "" else lines
    return {piece: token_id for token_id, piece in enumerate(pieces)}


def _text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, Mapping) and "content" in token else str(token)


def _flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    return value if isinstance(value := config.get(name), bool) else default
