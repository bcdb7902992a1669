"""A small tokenizer of every kind that the supported families use, in the files that their checkpoints contain."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.text.tokenizers.hostile import CORPUS

_GPT4_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPACE = "\u2581"


@dataclass(frozen=True)
class Kind:
    """make: makes the content of tokenizer.json. model_type: in config.json; it selects transformers' class. config:
    tokenizer_config.json. files: other files. options: arguments that transformers needs."""

    make: Callable[[], tokenizers.Tokenizer]
    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def write(self, directory: Path) -> Path:
        directory.mkdir(parents=True)
        self.make().save(str(directory / "tokenizer.json"))
        contents = {"config.json": {"model_type": self.model_type}, "tokenizer_config.json": self.config, **self.files}
        for name, content in contents.items():
            (directory / name).write_text(json.dumps(content), encoding="utf-8")
        return directory


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def byte_level(
    splits: Sequence[pre_tokenizers.PreTokenizer],
    *,
    added: Sequence[str | AddedToken] = (),
    prefix: Sequence[str] = (),
    normalizer: normalizers.Normalizer | None = None,
    ignore_merges: bool = False,
    cuts_words: bool = False,
) -> tokenizers.Tokenizer:
    """splits: steps that split text, before its bytes become letters. prefix: tokens that the post-processor adds
    before a text. cuts_words: split into words as GPT-2 does, after `splits`; always if there are none."""
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cuts_words or not splits)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, show_progress=False, initial_alphabet=alphabet)
    )
    _add(backend, added)
    steps: list[Any] = [processors.ByteLevel(trim_offsets=False)]
    if prefix:
        steps.append(_template(backend, prefix))
    backend.post_processor = processors.Sequence(steps)
    return backend


def sentencepiece_bpe(
    special: Sequence[str],
    *,
    added: Sequence[str | AddedToken] = (),
    pieces: Sequence[str] = (),
    normalizer: normalizers.Normalizer | None = None,
    pre_tokenizer: pre_tokenizers.PreTokenizer | None = None,
    strips: bool = True,
    prefix: Sequence[str] = (),
) -> tokenizers.Tokenizer:
    """A vocabulary with byte fallback: special tokens, then bytes, then pieces, then trained pieces."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", _SPACE)
    trained.pre_tokenizer = _split(f"{_SPACE}+[^{_SPACE}]*|[0-9]")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=260, show_progress=False, limit_alphabet=90))
    learned = json.loads(trained.to_str())["model"]
    names = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    names += [_SPACE * n for n in (1, 2, 3, 4) if _SPACE * n not in names]
    names += [name for name in learned["vocab"] if name not in names]
    merges = [(_SPACE * n, _SPACE) for n in (1, 2, 3)]
    merges += [tuple(pair) for pair in learned["merges"] if tuple(pair) not in merges]
    vocab = {name: index for index, name in enumerate(names)}
    unk = "<unk>"
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    _add(backend, [*special, *added])
    if prefix:
        backend.post_processor = _template(backend, prefix)
    return backend


def unigram() -> tokenizers.Tokenizer:
    """The form of T5 and ALBERT: no byte fallback, words split at spaces."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence(
        [normalizers.Replace("``", '"'), normalizers.Replace("''", '"'), normalizers.NFKC()]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="always")
    backend.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=300, show_progress=False, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>"
    )
    backend.train_from_iterator(CORPUS, trainer)
    eos = backend.token_to_id("</s>")
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", eos)])
    return backend


def _add(backend: tokenizers.Tokenizer, tokens: Sequence[str | AddedToken]) -> None:
    backend.add_tokens(
        [AddedToken(t, special=True, normalized=False) if isinstance(t, str) else t for t in tokens],
    )


def _template(backend: tokenizers.Tokenizer, prefix: Sequence[str]) -> Any:
    ids = [(token, backend.token_to_id(token)) for token in prefix]
    return processors.TemplateProcessing(single=[*prefix, "$A"], special_tokens=ids)


def plain(text: str, **flags: bool) -> AddedToken:
    """An added token that is recognised in a text and not hidden."""
    return AddedToken(text, **{"special": False, "normalized": False, **flags})


def _old(text: str, **flags: bool) -> dict[str, Any]:
    """A special token as configurations contain it."""
    names = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {"__type": "AddedToken", "content": text, **names, **flags}


_LLAMA_SPECIAL = ("<unk>", "<s>", "</s>")
_LLAMA_CONFIG = {"tokenizer_class": "LlamaTokenizer", "bos_token": _old("<s>"), "eos_token": _old("</s>"),
                 "unk_token": _old("<unk>"), "clean_up_tokenization_spaces": False, "add_eos_token": False}  # fmt: skip
_LEGACY = [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
_GEMMA_PIECES = ("\n", "\n\n", "\n\n\n", "\t", _SPACE * 2, _SPACE * 3, _SPACE * 4, "<table>", "<h1>")


def _metaspace() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="first", split=False)


KINDS = {
    "llama-3": Kind(
        lambda: byte_level(
            [_split(_GPT4_WORDS)],
            added=["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|reserved_special_token_0|>"],
            prefix=["<|begin_of_text|>"],
            ignore_merges=True,
        ),
        "llama",
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>",
         "clean_up_tokenization_spaces": True, "model_input_names": ["input_ids", "attention_mask"]},
    ),
    "qwen2": Kind(
        lambda: byte_level(
            [_split(_GPT4_WORDS.replace("{1,3}", ""))],
            added=["<|endoftext|>", "<|im_start|>", "<|im_end|>", plain("<think>"), plain("</think>")],
            normalizer=normalizers.NFC(),
        ),
        "qwen2",
        {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False, "add_prefix_space": False, "bos_token": None,
         "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None, "errors": "replace",
         "additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "split_special_tokens": False},
    ),
    "starcoder": Kind(
        lambda: byte_level(
            [pre_tokenizers.Digits(individual_digits=True)],
            cuts_words=True,
            added=["<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>"],
        ),
        "gpt_bigcode",
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>",
         "unk_token": "<|endoftext|>", "additional_special_tokens": ["<|endoftext|>", "<fim_prefix>"]},
    ),
    "mistral-0.1": Kind(
        lambda: sentencepiece_bpe(
            _LLAMA_SPECIAL, normalizer=normalizers.Sequence(_LEGACY), prefix=["<s>"]
        ),
        "mistral",
        {**_LLAMA_CONFIG, "add_bos_token": True, "legacy": True},
        {"special_tokens_map.json": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}},
    ),
    "llama-2": Kind(
        lambda: sentencepiece_bpe(_LLAMA_SPECIAL, pre_tokenizer=_metaspace(), prefix=["<s>"]),
        "llama",
        {**_LLAMA_CONFIG, "add_bos_token": True, "add_eos_token": True, "legacy": False},
    ),
    "phi-3": Kind(
        lambda: sentencepiece_bpe(
            _LLAMA_SPECIAL,
            normalizer=normalizers.Sequence(_LEGACY),
            added=[
                AddedToken("<|endoftext|>", special=True, normalized=False),
                AddedToken("<|assistant|>", special=True, normalized=False, rstrip=True),
                AddedToken("<|end|>", special=True, normalized=False, rstrip=True),
                plain("</think>", lstrip=True, rstrip=True),
            ],
        ),
        "phi3",
        {**_LLAMA_CONFIG, "add_bos_token": False, "eos_token": "<|endoftext|>", "legacy": False},
    ),
    "gemma": Kind(
        lambda: sentencepiece_bpe(
            ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"),
            pieces=_GEMMA_PIECES,
            added=[plain(piece) for piece in _GEMMA_PIECES],
            normalizer=normalizers.Replace(" ", _SPACE),
            pre_tokenizer=pre_tokenizers.Split(" ", "merged_with_previous"),
            strips=False,
            prefix=["<bos>"],
        ),
        "gemma2",
        {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True, "add_eos_token": False, "bos_token": _old("<bos>"),
         "eos_token": _old("<eos>"), "unk_token": "<unk>", "pad_token": "<pad>",
         "additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"]},
    ),
    "glm-4": Kind(
        lambda: byte_level(
            [_split(_GPT4_WORDS)],
            added=["<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>"],
            prefix=["[gMASK]", "<sop>"],
        ),
        "glm4",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>",
         "additional_special_tokens": ["[gMASK]", "<sop>", "<|user|>"], "do_lower_case": False},
    ),
    "deepseek-v3": Kind(
        lambda: byte_level(
            [_split(r"\p{N}{1,3}"), _split("[一-龥぀-ゟ゠-ヿ]+"), _split(_DEEPSEEK_WORDS)],
            added=["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", plain("<｜User｜>"), plain("<think>")],
            normalizer=normalizers.Sequence([]),
        ),
        "deepseek_v3",
        {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "add_eos_token": False, "legacy": True,
         "bos_token": _old("<｜begin▁of▁sentence｜>", normalized=True), "unk_token": None,
         "eos_token": _old("<｜end▁of▁sentence｜>", normalized=True), "pad_token": None},
        # transformers ignores this beside a tokenizer.json since 5.0; the models were trained with the token.
        options={"add_bos_token": True},
    ),
    "stablelm": Kind(
        lambda: byte_level(
            [],
            added=["<|endoftext|>", "<|padding|>", *(plain(" " * n, normalized=True) for n in range(24, 1, -1))],
            normalizer=normalizers.NFC(),
        ),
        "stablelm",
        {"tokenizer_class": "GPTNeoXTokenizer", "add_prefix_space": False, "bos_token": "<|endoftext|>",
         "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"},
    ),
    "unigram": Kind(
        unigram, "llama", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "<pad>"}
    ),
}  # fmt: skip
