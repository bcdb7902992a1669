"""InternVL 2.5 to 3.5 in the form of transformers: a Qwen2, Qwen3 or Llama that reads images in tiles."""

from __future__ import annotations

from typing import Final

from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.llama import read_llama
from pagewick.models.multimodal import read_text_part, text_entries
from pagewick.models.qwen import read_qwen2, read_qwen3, read_qwen3_moe
from pagewick.models.vision.intern_entries import with_intern

_TEXT_PARTS: Final = {"qwen2": read_qwen2, "qwen3": read_qwen3, "qwen3_moe": read_qwen3_moe, "llama": read_llama}


def read_internvl(entries: Entries) -> ModelConfig:
    """Published files say only in the entries of the text part whether the head is tied."""
    text = text_entries(entries)
    read = _TEXT_PARTS[text.choice("model_type", tuple(_TEXT_PARTS), "qwen2")]
    return with_intern(read_text_part(entries, read, is_tied=text.flag("tie_word_embeddings", True)), entries)
