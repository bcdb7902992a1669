"""Mellum 2. Llama, except:

- Experts in all layers, the best of a softmax over all, without a shared one; layers may have an MLP in their place.
- Queries and keys are normalised per head.
- Layers with a window are rotated in a way of their own.
- A further layer of a file, which predicts later tokens, serves --speculative-method mtp. It has a window and experts.
"""

from __future__ import annotations

from typing import Final

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.deepseek import layers_by_kind
from pagewick.models.entries import MAX_LAYERS, Entries
from pagewick.models.mtp_offers import offer, qwen_mtp
from pagewick.models.parts import HeadNormConfig, LayerConfig, NormConfig

_DEFAULTS: Final = {
    "head_dim": 128,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "norm_topk_prob": True,
    "sliding_window": 1024,
}
_LATER_TOKENS: Final = r"mtp\..*"
# Kinds of the layer that predicts later tokens, if its entries are left out.
_LATER_KINDS: Final = {"mtp_layer_types": reading.SLIDING, "mtp_mlp_layer_types": "sparse"}


def read_mellum(entries: Entries) -> ModelConfig:
    # transformers writes the second name.
    entries = entries.renamed({"num_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"})
    entries = entries.filled(_DEFAULTS)
    entries.demand("use_sliding_window", True, True, "layer_types says which layers have a window")
    eps, has_bias = entries.positive("rms_norm_eps", 1e-6), entries.flag("attention_bias", False)
    attention = reading.read_attention(entries, qkv_bias=has_bias, o_bias=has_bias, head_norm=HeadNormConfig(eps=eps))
    num_experts = entries.size("num_experts", 64)
    moe = reading.make_moe(
        {
            "top_k": entries.size("num_experts_per_tok", 8, most=num_experts),
            "renormalize": entries.flag("norm_topk_prob", False),
        },
        num_experts=num_experts,
        intermediate_size=entries.size("moe_intermediate_size"),
        activation=reading.read_activation(entries),
    )
    mlps = layers_by_kind(entries, moe, default_dense=0)
    windows = reading.read_windows(entries, [False] * len(mlps))
    everywhere = reading.read_rope_of(entries, attention, default_theta=5e5, layer_type=reading.FULL)
    within = reading.read_rope_of(entries, attention, default_theta=1e4, layer_type=reading.SLIDING)
    layers = [
        LayerConfig(attention=attention, mlp=mlp, rope=everywhere if window is None else within, window=window)
        for mlp, window in zip(mlps, windows, strict=True)
    ]
    config = reading.model_config(entries, norm=NormConfig(eps=eps), layers=tuple(layers), ignored=(_LATER_TOKENS,))
    if not entries.count("num_nextn_predict_layers", 0, most=MAX_LAYERS):
        return config
    kinds = [(entries.texts(name) or (usual,))[0] for name, usual in _LATER_KINDS.items()]
    if kinds != list(_LATER_KINDS.values()):
        return config
    window = entries.size("sliding_window")
    return offer(config, qwen_mtp(own=LayerConfig(attention=attention, mlp=moe, rope=within, window=window)))
