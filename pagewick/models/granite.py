"""Granite 3: Llama, except for four factors.

embedding_multiplier scales the embeddings, residual_multiplier the outputs of attention and MLP, attention_multiplier
the products of queries and keys (in place of 1 / sqrt(head_dim)); logits are divided by logits_scaling.
"""

from __future__ import annotations

from pagewick.models import reading
from pagewick.models.config import ModelConfig, NormConfig
from pagewick.models.entries import Entries


def read_granite(entries: Entries) -> ModelConfig:
    entries = entries.filled({"max_position_embeddings": 2048})
    has_bias = entries.flag("attention_bias", False)
    attention = reading.read_attention(
        entries, qkv_bias=has_bias, o_bias=has_bias, softmax_scale=entries.positive("attention_multiplier", 1.0)
    )
    mlp = reading.read_mlp(entries, bias=entries.flag("mlp_bias", False))
    rope = reading.read_rope_of(entries, attention)
    return reading.model_config(
        entries,
        norm=NormConfig(eps=entries.positive("rms_norm_eps", 1e-6)),
        layers=reading.same_layers(reading.read_num_layers(entries), attention, mlp, rope),
        embedding_scale=entries.positive("embedding_multiplier", 1.0),
        residual_scale=entries.positive("residual_multiplier", 1.0),
        logit_scale=1.0 / entries.positive("logits_scaling", 1.0),
    )
