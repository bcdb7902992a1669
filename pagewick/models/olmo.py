"""OLMo 2 and 3, and OLMoE. Llama, except:

- Queries and keys are normalised, each over all heads together.
- OLMo 2 and 3: the norms of a layer come after attention and MLP, not before them.
- OLMo 3: a window in three of four layers, which are rotated without the scaling of the others.
- OLMoE: experts in all layers, the best of a softmax over all.
"""

from __future__ import annotations

from typing import Any

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.parts import AttentionConfig, HeadNormConfig, LayerConfig, NormConfig


def read_olmo2(entries: Entries) -> ModelConfig:
    entries = entries.filled({"max_position_embeddings": 2048})
    attention = _attention(entries)
    rope = reading.read_rope_of(entries, attention)
    num_layers = reading.read_num_layers(entries)
    layers = reading.same_layers(num_layers, attention, reading.read_mlp(entries), rope)
    return _model(entries, layers=layers, block="post_norm")


def read_olmo3(entries: Entries) -> ModelConfig:
    # In the old spelling, one rope_theta is that of all layers.
    entries = entries.renamed({"rope_local_base_freq": "rope_theta"})
    entries = entries.filled({"max_position_embeddings": 2048, "sliding_window": 4096})
    attention, mlp = _attention(entries), reading.read_mlp(entries)
    num_layers = reading.read_num_layers(entries)
    windows = reading.read_windows(entries, [(layer_idx + 1) % 4 != 0 for layer_idx in range(num_layers)])
    everywhere, within = (
        reading.read_rope_of(entries, attention, default_theta=5e5, layer_type=layer_type)
        for layer_type in ("full_attention", "sliding_attention")
    )
    layers = [
        LayerConfig(attention=attention, mlp=mlp, rope=everywhere if window is None else within, window=window)
        for window in windows
    ]
    return _model(entries, layers=tuple(layers), block="post_norm")


def read_olmoe(entries: Entries) -> ModelConfig:
    entries = entries.renamed({"num_experts": "num_local_experts"}).filled({"max_position_embeddings": 4096})
    for name in ("clip_qkv", "sliding_window"):
        entries.demand(name, None, None)
    num_experts = entries.size("num_experts", 64)
    moe = reading.make_moe(
        {
            "top_k": entries.size("num_experts_per_tok", 8, most=num_experts),
            "renormalize": entries.flag("norm_topk_prob", False),
        },
        num_experts=num_experts,
        intermediate_size=entries.size("intermediate_size"),
        activation=reading.read_activation(entries),
    )
    attention = _attention(entries)
    rope = reading.read_rope_of(entries, attention)
    return _model(entries, layers=reading.same_layers(reading.read_num_layers(entries), attention, moe, rope))


def _attention(entries: Entries) -> AttentionConfig:
    has_bias = entries.flag("attention_bias", False)
    norm = HeadNormConfig(eps=entries.positive("rms_norm_eps", 1e-5), is_joint=True)
    return reading.read_attention(entries, qkv_bias=has_bias, o_bias=has_bias, head_norm=norm)


def _model(entries: Entries, **fields: Any) -> ModelConfig:
    return reading.model_config(entries, norm=NormConfig(eps=entries.positive("rms_norm_eps", 1e-5)), **fields)
