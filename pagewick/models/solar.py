"""Solar Open: Llama, except that all layers have experts and a shared one, which are chosen as in DeepSeek-V3."""

from __future__ import annotations

from typing import Final

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.deepseek import SHARED_EXPERTS, read_experts, sigmoid_routing
from pagewick.models.entries import Entries
from pagewick.models.parts import NormConfig

_DEFAULTS: Final = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}


def read_solar_open(entries: Entries) -> ModelConfig:
    entries = entries.filled(_DEFAULTS)
    if entries.count("first_k_dense_replace", 0):
        raise entries.wrong("first_k_dense_replace", "0: layers without experts are not supported")
    entries.demand("use_qk_norm", False, False)
    attention = reading.read_attention(entries, qkv_bias=entries.flag("attention_bias", False))
    num_experts = entries.size("n_routed_experts", 128)
    routing = sigmoid_routing(entries, num_experts, default_scaling=1.0)
    moe = read_experts(entries, routing, num_experts=num_experts, default_shared=1)
    rope = reading.read_rope_of(entries, attention, default_theta=1e6)
    return reading.model_config(
        entries,
        norm=NormConfig(eps=entries.positive("rms_norm_eps", 1e-5)),
        layers=reading.same_layers(reading.read_num_layers(entries), attention, moe, rope),
        names=(SHARED_EXPERTS,),
    )
