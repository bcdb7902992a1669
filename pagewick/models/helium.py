"""Helium: Llama, except that heads are rotated in pairs of neighbours, and share out the hidden size."""

from __future__ import annotations

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.parts import NormConfig


def read_helium(entries: Entries) -> ModelConfig:
    entries = entries.filled({"num_key_value_heads": 20, "head_dim": 128, "max_position_embeddings": 4096})
    attention = reading.read_attention(entries, qkv_bias=entries.flag("attention_bias", False))
    if attention.num_heads * attention.head_dim != entries.size("hidden_size"):
        raise entries.wrong("head_dim", "hidden_size / num_attention_heads")
    mlp = reading.read_mlp(entries, bias=entries.flag("mlp_bias", False))
    rope = reading.read_rope_of(entries, attention, default_theta=1e5, interleaved=True)
    return reading.model_config(
        entries,
        norm=NormConfig(eps=entries.positive("rms_norm_eps", 1e-8)),
        layers=reading.same_layers(reading.read_num_layers(entries), attention, mlp, rope),
    )
