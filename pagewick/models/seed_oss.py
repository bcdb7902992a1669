"""Seed-OSS: Llama with biases of queries, keys and values, and heads whose size is given."""

from __future__ import annotations

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.parts import NormConfig


def read_seed_oss(entries: Entries) -> ModelConfig:
    entries = entries.filled({"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 524288})
    attention = reading.read_attention(
        entries, qkv_bias=entries.flag("attention_bias", True), o_bias=entries.flag("attention_out_bias", False)
    )
    mlp = reading.read_mlp(entries, bias=entries.flag("mlp_bias", False))
    rope = reading.read_rope_of(entries, attention)
    return reading.model_config(
        entries,
        norm=NormConfig(eps=entries.positive("rms_norm_eps", 1e-6)),
        layers=reading.same_layers(reading.read_num_layers(entries), attention, mlp, rope),
    )
