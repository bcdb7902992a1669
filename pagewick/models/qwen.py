"""Qwen3. Llama, except: queries and keys are normalised per head, and head_dim is not hidden_size / num_heads."""

from __future__ import annotations

from pagewick.errors import ModelLoadError
from pagewick.models.config import ModelConfig
from pagewick.models.decoder import Decoder, DecoderConfig


class Qwen3(Decoder):
    @classmethod
    def decoder_config(cls, model: ModelConfig) -> DecoderConfig:
        if model.extra.get("use_sliding_window"):
            raise ModelLoadError("config.json: use_sliding_window is true, which is not supported yet for Qwen3")
        attention_bias = bool(model.extra.get("attention_bias", False))
        return DecoderConfig(qkv_bias=attention_bias, o_bias=attention_bias, qk_norm=True)
