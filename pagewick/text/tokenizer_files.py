"""Reads a tokenizer from a model directory: the vocabulary in one of six formats, and its configuration.

The configuration is `tokenizer_config.json` and older files beside it. The rules are those of transformers'
AutoTokenizer, so that both give the same ids. No code from the directory is executed.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import Sequence, TemplateProcessing

from pagewick.errors import ModelLoadError
from pagewick.text.captions import expect_captions, writes_captions
from pagewick.text.gguf_tokenizer import gguf_templates, gguf_tokenizer
from pagewick.text.guarded import guarded
from pagewick.text.kimi import TIKTOKEN_FILE, make_kimi
from pagewick.text.pre_tokenizers import QWEN2_WORDS
from pagewick.text.sentencepiece_backend import make_backend
from pagewick.text.sentencepiece_model import SentencePieceModel, charsmap_damage
from pagewick.text.tekken import TEKKEN_FILE, make_tekken
from pagewick.text.word_pieces import VOCABULARY_FILE, read_word_pieces, set_normalizer
from pagewick.weights.files import GGUF_SUFFIX
from pagewick.weights.gguf.checkpoint import open_gguf
from pagewick.weights.gguf.vocabulary import end_token_ids

# The largest vocabularies in use need about 35 MB of JSON.
MAX_TOKENIZER_BYTES = 256 * 2**20
MAX_CONFIG_BYTES = 16 * 2**20
# Llama 2's normalizer may make a text 12 times as long, in bytes: it puts U+2581 before it and in place of spaces. With
# a few replacements that multiply, a hostile one would make more than any memory holds of one word.
_MAX_GROWTH = 1024
SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# The class of GPT-2's two files whose texts have tokens around them.
_ROBERTA = "RobertaTokenizer"
# Old and new name of the list of further special tokens.
_MORE_SPECIAL_TOKENS = ("additional_special_tokens", "extra_special_tokens")
# In the order in which they are looked for.
_FILES = ("tokenizer.json", TEKKEN_FILE, "tokenizer.model", TIKTOKEN_FILE, "vocab.json", VOCABULARY_FILE)
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word")


def read_json_object(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Read the object in a JSON file; empty if the file is missing. Raises ModelLoadError for other content."""
    if not path.is_file():
        return {}
    if path.stat().st_size > max_bytes:
        raise ModelLoadError(f"{path} is larger than {max_bytes} bytes; it cannot be what its name says")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON ({error}); download the model again") from None
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} must hold a JSON object; download the model again")
    return content


def read_tokenizer(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any], list[int] | None]:
    """Read a tokenizer, its configuration, from older files if necessary, and the tokens that end a sequence, if known.

    path: a directory, a GGUF file, which has its own, or one of a tokenizer's files. In a directory, looks for
    tokenizer.json, then tekken.json (Mistral's), tokenizer.model (SentencePiece), tiktoken.model (Kimi's), vocab.json
    with merges.txt, and vocab.txt (BERT's).
    Raises ModelLoadError if there is none of them, or if one is unusable.
    """
    if path.suffix == GGUF_SUFFIX and path.is_file():
        values = open_gguf(path).values
        return *gguf_tokenizer(values, str(path)), end_token_ids(values)
    directory = path.parent if path.is_file() else path
    files = [directory / name for name in _FILES]
    file = next((file for file in files if file.is_file()), path) if directory == path else path
    config = _read_config(directory)
    if file.name == VOCABULARY_FILE:
        _check_size(file)
        backend = guarded(lambda: read_word_pieces(file, config), file)
    elif file.name == "vocab.json" and (directory / "merges.txt").is_file():
        backend = _from_merges(file, directory / "merges.txt", config)
    elif file.name == TEKKEN_FILE:
        backend = _from_tekken(file, config)
    elif file.suffix == ".json" and file.name != "vocab.json":
        backend = _from_json(file)
        set_normalizer(backend, config)
    elif file.name == TIKTOKEN_FILE:
        _check_size(file)
        backend = guarded(lambda: make_kimi(file.read_bytes(), config), file)
    elif file.suffix == ".model":
        backend = _from_sentencepiece(file, config)
    elif file == directory / "vocab.json" or file == directory:
        raise ModelLoadError(
            f"{directory} has no tokenizer.json, no tekken.json, no tokenizer.model, no tiktoken.model, no vocab.txt, "
            "and no vocab.json with merges.txt; use a model that has one of them, or write it with transformers: "
            f'AutoTokenizer.from_pretrained("{directory}").save_pretrained("{directory}")'
        )
    else:
        raise ModelLoadError(f"{file} is no tokenizer\n  give a tokenizer.json, a tokenizer.model, or a GGUF file")
    if writes_captions(model := read_json_object(directory / "config.json")):
        guarded(lambda: expect_captions(backend, config, model), directory)
    return backend, config, _eos_token_ids(directory)


def read_settings(model: Path) -> tuple[dict[str, Any], list[int] | None]:
    """Return what a model's files say beside its vocabulary: the tokenizer's configuration, the ends of a sequence.

    For a GGUF file, the configuration has the chat template only.
    """
    if model.is_file():
        values = open_gguf(model).values
        return {"chat_template": gguf_templates(values)}, end_token_ids(values)
    return _read_config(model), _eos_token_ids(model)


def token_text(value: Any) -> str | None:
    """Return a token's text from a configuration: a string, or an object with the string as its `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _eos_token_ids(directory: Path) -> list[int] | None:
    for name in ("generation_config.json", "config.json"):
        value = read_json_object(directory / name).get("eos_token_id")
        candidates = value if isinstance(value, list) else [value]
        token_ids = [token_id for token_id in candidates if isinstance(token_id, int)]
        if token_ids:
            return token_ids
    return None


def _read_config(directory: Path) -> dict[str, Any]:
    """Read tokenizer_config.json, or for older checkpoints special_tokens_map.json and added_tokens.json with it."""
    config = read_json_object(directory / "tokenizer_config.json")
    if "added_tokens_decoder" in config:
        return config
    config |= read_json_object(directory / "special_tokens_map.json")
    special = {token_text(config.get(name)) for name in SPECIAL_TOKEN_NAMES}
    older = {}
    for text, token_id in read_json_object(directory / "added_tokens.json").items():
        is_special = text in special
        older[str(token_id)] = {"content": text, "special": is_special, "normalized": not is_special}
    return config | {"added_tokens_decoder": older} if older else config


def _from_json(file: Path) -> tokenizers.Tokenizer:
    _check_size(file)
    backend = guarded(lambda: tokenizers.Tokenizer.from_file(str(file)), file)
    if backend.normalizer is not None:
        guarded(lambda: _check_normalizer(json.loads(backend.normalizer.__getstate__())), file)
    return backend


def _from_tekken(file: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    """Also adds to `config` the roles of tokens that it leaves open."""
    _check_size(file)
    backend, roles = guarded(lambda: make_tekken(read_json_object(file, MAX_TOKENIZER_BYTES)), file)
    for name, value in roles.items():
        config.setdefault(name, value)
    return backend


def _check_normalizer(rules: Mapping[str, Any]) -> None:
    """Raise ValueError for rules of normalisation that the library cannot apply to every text."""
    if (growth := _growth(rules)) > _MAX_GROWTH:
        raise ValueError(f"its normalizer may make a text {growth:,} times as long, and the limit is {_MAX_GROWTH:,}")


def _growth(rules: Mapping[str, Any]) -> int:
    """Return an upper limit of how many times as long, in bytes, a text may become by its replacements."""
    growth = math.prod(_growth(part) for part in rules.get("normalizers", []))
    match rules:
        case {"type": "Precompiled", "precompiled_charsmap": table}:
            if damage := charsmap_damage(base64.b64decode(table)):
                raise ValueError(f"its rules of normalisation: {damage}")
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": new}:
            growth = max(1, -(-len(new.encode()) // max(1, len(old.encode()))))
        # A regular expression may match the empty text between any two characters. A prefix stands before each part of
        # a text between two special tokens.
        case {"type": "Replace", "content": new} | {"type": "Prepend", "prepend": new}:
            growth = 1 + len(new.encode())
    return growth


def _from_sentencepiece(file: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    """Also adds to `config` the token names and rules that the model file contains."""
    read = SentencePieceModel.read(file)
    model = guarded(lambda: _renamed(read, config), "tokenizer_config.json")
    adds_prefix_space = config.get("add_prefix_space")
    if adds_prefix_space is None:
        adds_prefix_space = model.adds_dummy_prefix
    for name, token_id in (("bos_token", model.bos_id), ("eos_token", model.eos_id), ("unk_token", model.unk_id)):
        if name not in config and token_id is not None:
            config[name] = model.pieces[token_id].text
    # transformers' classes for such files add this token by default.
    config.setdefault("add_bos_token", config.get("bos_token") is not None)
    is_legacy = config.get("legacy") is not False
    return guarded(lambda: make_backend(model, is_legacy=is_legacy, adds_prefix_space=bool(adds_prefix_space)), file)


def _renamed(model: SentencePieceModel, config: Mapping[str, Any]) -> SentencePieceModel:
    """Rename placeholder entries of the vocabulary as the configuration says."""
    pieces = list(model.pieces)
    texts = {piece.text for piece in pieces}
    for token_id, token in _listed_tokens(config).items():
        if token_id < len(pieces) and token.content not in texts:
            pieces[token_id] = dataclasses.replace(pieces[token_id], text=token.content)
    return dataclasses.replace(model, pieces=tuple(pieces))


def _from_merges(vocabulary: Path, merges: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Read GPT-2's two files. They do not say how text is split into words; that depends on the tokenizer class."""
    name = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    adds_prefix_space = config.get("add_prefix_space") is True
    for file in (vocabulary, merges):
        _check_size(file)
    if name in ("GPT2Tokenizer", "CodeGenTokenizer", _ROBERTA):
        splits: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.ByteLevel(add_prefix_space=adds_prefix_space)]
    elif name == "Qwen2Tokenizer":
        words = pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated")
        splits = [words, pre_tokenizers.ByteLevel(add_prefix_space=adds_prefix_space, use_regex=False)]
    else:
        raise ModelLoadError(
            f"{vocabulary} and merges.txt do not say how text is split, and tokenizer_class is {name or 'not given'}, "
            "not GPT2Tokenizer, CodeGenTokenizer, RobertaTokenizer or Qwen2Tokenizer; use a model that has a "
            "tokenizer.json"
        )
    backend = tokenizers.Tokenizer(guarded(lambda: models.BPE.from_file(str(vocabulary), str(merges)), merges))
    if name == _ROBERTA:
        edges = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
        backend.post_processor = guarded(
            lambda: TemplateProcessing(single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=edges),
            vocabulary,
        )
    if name == "Qwen2Tokenizer":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    backend.decoder = decoders.ByteLevel()
    return backend


def apply_config(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Configure a tokenizer as tokenizer_config.json says. Raises ModelLoadError if that is not possible."""
    guarded(lambda: _apply(backend, config), "tokenizer_config.json")


def _apply(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    listed = _listed_tokens(config)
    known = backend.get_added_tokens_decoder()
    for token_id, token in sorted(listed.items()):
        if token_id not in known or repr(known[token_id]) != repr(token):
            backend.add_tokens([token])
        if (found := backend.token_to_id(token.content)) != token_id:
            raise ValueError(f"{token.content!r} is listed with the id {token_id}, but has {found} in the vocabulary")
    by_text = {token.content: token for token in listed.values()}
    values = [config.get(name) for name in SPECIAL_TOKEN_NAMES]
    for name in _MORE_SPECIAL_TOKENS:
        more = config.get(name)
        values += more.values() if isinstance(more, dict) else more if isinstance(more, list) else []
    for value in values:
        if text := token_text(value):
            token = by_text.get(text) or _added_token(value if isinstance(value, dict) else {"content": text})
            backend.add_special_tokens([token])
    backend.encode_special_tokens = config.get("split_special_tokens") is True
    _set_edges(backend, config)


def _listed_tokens(config: Mapping[str, Any]) -> dict[int, AddedToken]:
    entries = config.get("added_tokens_decoder") or {}
    return {int(token_id): _added_token(entry) for token_id, entry in entries.items()}


def _added_token(entry: Mapping[str, Any]) -> AddedToken:
    flags = {name: entry[name] for name in _FLAGS if name in entry}
    return AddedToken(entry["content"], special=bool(entry.get("special", False)), **flags)


def _set_edges(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Add the tokens around a text that the configuration asks for and the tokenizer does not add by itself.

    If tokenizer.json has such rules, only add_bos_token counts: DeepSeek's files rely on it.
    """
    wanted = {name: token_text(config.get(f"{name}_token")) for name in ("bos", "eos")}
    before, after = (token if config.get(f"add_{name}_token") is True else None for name, token in wanted.items())
    rules = backend.post_processor
    if rules is not None:
        after = None
        if before and backend.token_to_id(before) in backend.encode("", add_special_tokens=True).ids[:1]:
            return
    if not before and not after:
        return
    ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys((before, after)) if token]
    edges = TemplateProcessing(single=[token for token in (before, "$A", after) if token], special_tokens=ids)
    backend.post_processor = edges if rules is None else Sequence([rules, edges])


def _check_size(file: Path) -> None:
    if file.stat().st_size > MAX_TOKENIZER_BYTES:
        raise ModelLoadError(f"{file} is larger than {MAX_TOKENIZER_BYTES} bytes; it is not a tokenizer")
