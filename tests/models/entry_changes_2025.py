"""The changes of test_config_fields.py for families whose first models were published since 2025, and some others."""

from __future__ import annotations

from typing import Any

CHANGES_2025: dict[str, list[dict[str, Any]]] = {
    "glm-4.5": [
        {"attention_bias": False},
        {"use_qk_norm": False},
        {"rope_parameters.partial_rotary_factor": 0.25},
        {"routed_scaling_factor": 1.3},
        {"first_k_dense_replace": 2},
        {"n_shared_experts": 2},
        {"rms_norm_eps": 0.02},
    ],
    "glm-4.5-air": [{"norm_topk_prob": True}, {"n_group": 3}, {"topk_group": 3}],
    "glm-4.7-flash": [{"rope_interleave": False}, {"mlp_layer_types": ["dense", "dense", "sparse"]}],
    "ministral-3": [
        {"rope_parameters.llama_4_scaling_beta": 0.6},
        {"rope_parameters.llama_4_scaling_beta": 0.0},
        {"rope_parameters.original_max_position_embeddings": 40},
        {"rope_parameters.mscale": 0.5},
        {"sliding_window": 40},
    ],
    "qwen2-vl": [{"text_config.rms_norm_eps": 0.02}, {"text_config.rope_parameters.rope_theta": 9e5}],
    "qwen2.5-vl-window": [{"text_config.max_window_layers": 1}, {"text_config.sliding_window": 30}],
    "qwen3-vl": [{"text_config.attention_bias": False}, {"text_config.rope_parameters.rope_theta": 900.0}],
    "qwen3-vl-moe": [{"text_config.num_experts_per_tok": 2}, {"text_config.mlp_only_layers": [0]}],
    "granite-moe": [
        {"num_experts_per_tok": 2},
        {"embedding_multiplier": 3.1},
        {"residual_multiplier": 0.45},
        {"attention_multiplier": 0.32},
        {"logits_scaling": 1.72},
        {"attention_bias": True},
    ],
    "granite-4": [
        {"position_embedding_type": None},
        {"embedding_multiplier": 3.1},
        {"residual_multiplier": 0.45},
        {"attention_multiplier": 0.32},
        {"logits_scaling": 1.72},
        {"rope_parameters.rope_theta": 9e4},
    ],
    "command-r": [
        {"logit_scale": 0.7},
        {"use_qk_norm": True},
        {"attention_bias": True},
        {"layer_norm_eps": 0.05},
        {"rope_parameters.rope_theta": 900.0},
        {"tie_word_embeddings": False},
    ],
    "command-r7b": [
        {"sliding_window": 21},
        {"layer_types": ["full_attention", "sliding_attention"] * 2},
        {"logit_scale": 0.7},
    ],
    "minimax-m2": [
        {"num_experts_per_tok": 2},
        {"rope_parameters.partial_rotary_factor": 0.25},
        {"rope_parameters.rope_theta": 900.0},
        {"rms_norm_eps": 0.02},
    ],
    "smollm3": [{"no_rope_layer_interval": 2}, {"no_rope_layers": [0, 1, 1, 1]}, {"tie_word_embeddings": False}],
    "smollm3-window": [{"use_sliding_window": False}, {"sliding_window": 22}],
    "seed-oss": [{"attention_bias": False}, {"attention_out_bias": True}, {"mlp_bias": True}, {"head_dim": 12}],
    "olmo-2": [{"rms_norm_eps": 0.02}, {"attention_bias": True}, {"rope_parameters.rope_theta": 9e4}],
    "olmo-3": [
        {"sliding_window": 20},
        {"layer_types": ["full_attention", "sliding_attention"] * 2},
        {"rope_parameters.full_attention.factor": 3.0},
        {"rope_parameters.sliding_attention.rope_theta": 900.0},
    ],
    "olmoe": [{"norm_topk_prob": True}, {"num_experts_per_tok": 2}, {"rms_norm_eps": 0.02}],
    "ernie-4.5": [{"use_bias": True}, {"rope_parameters.rope_theta": 9e4}, {"tie_word_embeddings": False}],
    "ernie-4.5-moe": [
        {"moe_k": 2},
        {"moe_num_shared_experts": 1},
        {"moe_layer_start_index": 2},
        {"moe_layer_end_index": 1},
    ],
    "exaone-4-32b": [
        {"sliding_window": 21},
        {"layer_types": ["full_attention", "sliding_attention"] * 2},
        {"rope_parameters.factor": 2.0},
        {"rms_norm_eps": 0.02},
    ],
}
