"""LightOnOCR 1 and 2: a Qwen3 that reads images with the encoder of Mistral's models."""

from __future__ import annotations

from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.multimodal import read_text_part, text_entries
from pagewick.models.qwen import read_qwen3
from pagewick.models.vision.pixtral_entries import with_lighton


def read_lighton_ocr(entries: Entries) -> ModelConfig:
    text_entries(entries).choice("model_type", ("qwen3",), "qwen3")
    return with_lighton(read_text_part(entries, read_qwen3, is_tied=True), entries)
