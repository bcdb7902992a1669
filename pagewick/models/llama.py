"""Llama 1, 2, 3, 3.1, 3.2, Yi and DeepSeek-R1-Distill-Llama: the decoder as it is. Biases where the file says so."""

from __future__ import annotations

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.parts import NormConfig


def read_llama(entries: Entries) -> ModelConfig:
    entries = entries.filled({"max_position_embeddings": 2048})
    has_bias = entries.flag("attention_bias", False)
    attention = reading.read_attention(entries, qkv_bias=has_bias, o_bias=has_bias)
    mlp = reading.read_mlp(entries, bias=entries.flag("mlp_bias", False))
    rope = reading.read_rope_of(entries, attention)
    return reading.model_config(
        entries,
        norm=NormConfig(eps=entries.positive("rms_norm_eps", 1e-6)),
        layers=reading.same_layers(reading.read_num_layers(entries), attention, mlp, rope),
    )
