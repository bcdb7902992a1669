"""dots.llm1 (Dots1). Llama, except:

- Queries and keys are normalised per head.
- All layers but the first have experts and a shared one, which are chosen as in DeepSeek-V3.
- With a sliding_window, the layers from max_window_layers on have one.
"""

from __future__ import annotations

from typing import Final

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.deepseek import SHARED_EXPERTS, first_layers_dense, read_experts, sigmoid_routing
from pagewick.models.entries import Entries
from pagewick.models.parts import HeadNormConfig, NormConfig

_DEFAULTS: Final = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "n_group": 1,
    "topk_group": 1,
    "sliding_window": 4096,
}
# The published files' name of the way in which experts are chosen.
_BIASED: Final = "noaux_tc"


def read_dots1(entries: Entries) -> ModelConfig:
    entries = entries.filled(_DEFAULTS)
    if entries.get("scoring_func") == _BIASED:
        entries = entries.replaced({"scoring_func": "sigmoid"})
    eps, has_bias = entries.positive("rms_norm_eps", 1e-6), entries.flag("attention_bias", False)
    attention = reading.read_attention(entries, qkv_bias=has_bias, o_bias=has_bias, head_norm=HeadNormConfig(eps=eps))
    num_experts = entries.size("n_routed_experts")
    routing = sigmoid_routing(entries, num_experts, default_scaling=1.0)
    moe = read_experts(entries, routing, num_experts=num_experts, default_shared=None)
    num_layers = reading.read_num_layers(entries)
    mlps = first_layers_dense(entries, moe, min(num_layers, entries.count("first_k_dense_replace", 0)))
    rope, first = reading.read_rope_of(entries, attention), entries.count("max_window_layers", 62)
    has_window = "sliding_window" in entries
    windows = reading.read_windows(entries, [has_window and layer >= first for layer in range(num_layers)])
    return reading.model_config(
        entries,
        norm=NormConfig(eps=eps),
        layers=reading.same_layers(num_layers, attention, mlps, rope, windows),
        names=(SHARED_EXPERTS,),
    )
