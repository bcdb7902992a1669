"""Nemotron-4 and Minitron (Nemotron), and Jais 2. Llama, except:

- Layer norms, with biases; those of Nemotron have weights that are 1 less than what they multiply by.
- An MLP without a gate; its activation is the square of a ReLU.
- Nemotron: half of each head is rotated.
- Jais 2: biases everywhere but in the head.
"""

from __future__ import annotations

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.parts import NormConfig


def read_nemotron(entries: Entries) -> ModelConfig:
    # Some published files have the second name.
    entries = entries.renamed({"partial_rotary_factor": "rope_percent"}).filled({"max_position_embeddings": 4096})
    has_bias = entries.flag("attention_bias", False)
    attention = reading.read_attention(entries, qkv_bias=has_bias, o_bias=has_bias)
    activation = reading.read_activation(entries, "relu2")
    mlp = reading.read_mlp(entries, activation=activation, is_gated=False, bias=entries.flag("mlp_bias", False))
    rope = reading.read_rope_of(entries, attention, default_partial_rotary_factor=0.5)
    return reading.model_config(
        entries,
        norm=NormConfig(kind="layer", eps=entries.positive("norm_eps", 1e-5), offset=1.0, has_bias=True),
        layers=reading.same_layers(reading.read_num_layers(entries), attention, mlp, rope),
    )


def read_jais2(entries: Entries) -> ModelConfig:
    entries = entries.filled({"max_position_embeddings": 8192})
    has_bias = entries.flag("attention_bias", True)
    attention = reading.read_attention(entries, qkv_bias=has_bias, o_bias=has_bias)
    activation = reading.read_activation(entries, "relu2")
    mlp = reading.read_mlp(entries, activation=activation, is_gated=False, bias=entries.flag("mlp_bias", True))
    rope = reading.read_rope_of(entries, attention)
    return reading.model_config(
        entries,
        norm=NormConfig(kind="layer", eps=entries.positive("layer_norm_eps", 1e-5), has_bias=True),
        layers=reading.same_layers(reading.read_num_layers(entries), attention, mlp, rope),
    )
