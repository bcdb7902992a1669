"""The changes of test_config_fields.py for families whose first models were published since 2026, and Phi-3.5-MoE."""

from __future__ import annotations

from typing import Any

CHANGES_2026: dict[str, list[dict[str, Any]]] = {
    "phi-3.5-moe": [
        {"router_jitter_noise": 0.3},
        {"sliding_window": None},
        {"attention_bias": False},
        {"lm_head_bias": False},
        {"rms_norm_eps": 0.02},
        {"hidden_act": "gelu"},
        {"rope_parameters.rope_theta": 900.0},
        {"rope_parameters.short_mscale": 0.9, "rope_parameters.long_mscale": 0.9},
        {"rope_parameters.short_factor": [1.5, 2.0, 2.4, 3.1, 4.0, 5.2, 6.0, 7.5]},
        {"tie_word_embeddings": True, "lm_head_bias": False},
    ],
    "granite-swash": [
        {"sliding_window": 30},
        {"layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"]},
        {"layer_rope_theta": [3e3, 3e3, 0, 1e3, 2e3]},
        {"layer_rope_theta": None},
        {"attention_multiplier": 0.32},
        {"residual_multiplier": 0.45},
        {"embedding_multiplier": 3.1},
        {"logits_scaling": 1.7},
        {"attention_bias": False},
        {"mlp_bias": False},
        {"rms_norm_eps": 0.03},
    ],
    "granite-swash-moe": [
        {"num_experts_per_tok": 2},
        {"shared_intermediate_size": 0},
        {"rope_parameters.rope_theta": 900.0},
        {"attention_bias": True},
    ],
    "hy3": [
        {"num_experts_per_tok": 2},
        {"router_scaling_factor": 1.3},
        {"num_shared_experts": 1},
        {"mlp_layer_types": ["dense", "sparse", "dense"]},
        {"attention_bias": True},
        {"rope_parameters.rope_theta": 900.0},
        {"rms_norm_eps": 0.02},
        {"tie_word_embeddings": True},
    ],
    "mellum-2": [
        {"num_experts_per_tok": 2},
        {"norm_topk_prob": False},
        {"sliding_window": 30},
        {"layer_types": ["full_attention", "sliding_attention"] * 2},
        {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]},
        {"attention_bias": True},
        {"rope_parameters.full_attention.factor": 3.0},
        {"rope_parameters.full_attention.attention_factor": 1.3},
        {"rope_parameters.sliding_attention.rope_theta": 900.0},
        {"rms_norm_eps": 0.02},
        {"tie_word_embeddings": True},
    ],
}
