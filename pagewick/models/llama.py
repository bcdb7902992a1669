"""Llama 1, 2, 3, 3.1 and 3.2: the decoder as it is. Biases only where config.json asks for them."""

from __future__ import annotations

from pagewick.models.config import ModelConfig
from pagewick.models.decoder import Decoder, DecoderConfig


class Llama(Decoder):
    @classmethod
    def decoder_config(cls, model: ModelConfig) -> DecoderConfig:
        attention_bias = bool(model.extra.get("attention_bias", False))
        return DecoderConfig(
            qkv_bias=attention_bias, o_bias=attention_bias, mlp_bias=bool(model.extra.get("mlp_bias", False))
        )
