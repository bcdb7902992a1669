"""LLaVA 1.5, NeXT, OneVision and other models of their kind, Pixtral 12B among them: texts of several families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.llama import read_llama
from pagewick.models.mistral import read_mistral_text
from pagewick.models.multimodal import read_text_part, text_entries
from pagewick.models.qwen import read_qwen2
from pagewick.models.vision.clip_entries import NEXT, ONEVISION, with_llava
from pagewick.models.vision.pixtral_entries import with_pixtral

# Files leave out what is the default of a class of transformers.
_SIZES: Final = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_TEXT_PARTS: Final[dict[str, tuple[Callable[[Entries], ModelConfig], dict[str, Any]]]] = {
    "llama": (read_llama, {**_SIZES, "vocab_size": 32000, "intermediate_size": 11008}),
    "mistral": (read_mistral_text, {**_SIZES, "vocab_size": 32000, "intermediate_size": 14336, "rms_norm_eps": 1e-6}),
    "qwen2": (read_qwen2, {**_SIZES, "vocab_size": 151936, "intermediate_size": 22016}),
}


def read_llava(entries: Entries) -> ModelConfig:
    config, vision = _read_text(entries), entries.child("vision_config")
    if vision is not None and vision.get("model_type") == "pixtral":
        text_entries(entries).demand("model_type", "mistral", "llama", "this encoder has no other text part")
        return with_pixtral(config, entries, merges=False)
    return with_llava(config, entries)


def read_llava_next(entries: Entries) -> ModelConfig:
    entries.demand("use_image_newline_parameter", True, True, "a learned row is behind each row of tokens")
    return with_llava(_read_text(entries), entries, NEXT)


def read_llava_onevision(entries: Entries) -> ModelConfig:
    """It reads images only; videos have another way to their tokens."""
    entries.demand("use_image_newline_parameter", True, True, "a learned row is behind each row of tokens")
    return with_llava(_read_text(entries, default="qwen2"), entries, ONEVISION)


def _read_text(entries: Entries, *, default: str = "llama") -> ModelConfig:
    """default: the kind of text part of a file that names none."""
    text = text_entries(entries)
    read, sizes = _TEXT_PARTS[text.choice("model_type", tuple(_TEXT_PARTS), default)]
    is_tied = text.flag("tie_word_embeddings", False)
    if is_tied:
        # As in transformers, each of two entries ties the head.
        entries = entries.replaced({"tie_word_embeddings": True})
    return read_text_part(entries, lambda inner: read(inner.filled(sizes)), is_tied=is_tied)
