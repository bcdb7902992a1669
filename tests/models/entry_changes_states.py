"""The changes of test_config_fields.py for families with short convolutions or Mamba-2."""

from __future__ import annotations

from typing import Any

_LAYERS = ["full_attention", "linear_attention", "full_attention", "linear_attention"]

CHANGES_STATES: dict[str, list[dict[str, Any]]] = {
    "lfm2": [
        {"conv_L_cache": 4},
        {"conv_bias": True},
        {"norm_eps": 0.02},
        {"block_multiple_of": 24},
        {"block_ffn_dim_multiplier": 1.0},
        {"block_auto_adjust_ff_dim": False},
        {"layer_types": ["conv", "conv", "full_attention", "conv"]},
        {"rope_parameters.rope_theta": 900.0},
        {"tie_word_embeddings": False},
    ],
    "lfm2-vl": [{"text_config.conv_L_cache": 4}, {"tie_word_embeddings": False}],
    "lfm2-moe": [
        {"num_experts_per_tok": 2},
        {"routed_scaling_factor": 1.3},
        {"norm_topk_prob": False},
        {"num_dense_layers": 2},
    ],
    "granite-4-h": [
        {"mamba_n_heads": 6, "mamba_d_head": 32},
        {"mamba_n_groups": 2},
        {"mamba_d_state": 16},
        {"mamba_d_conv": 3},
        {"mamba_conv_bias": False},
        {"mamba_proj_bias": True},
        {"mamba_expand": 1, "mamba_d_head": 8},
        {"layer_types": _LAYERS},
        {"rms_norm_eps": 0.1},
        {"shared_intermediate_size": 32},
        {"position_embedding_type": "rope"},
    ],
    "granite-4-h-moe": [{"num_experts_per_tok": 2}, {"shared_intermediate_size": 32}, {"intermediate_size": 32}],
    "bamba": [
        {"attn_layer_indices": [2]},
        {"rope_parameters.partial_rotary_factor": 0.25},
        {"rope_parameters.rope_theta": 300.0},
        {"mlp_bias": True},
        {"mamba_n_groups": 2},
    ],
    "olmo-hybrid": [
        {"linear_num_key_heads": 3, "linear_num_value_heads": 3},
        {"linear_key_head_dim": 24},
        {"linear_value_head_dim": 16},
        {"linear_conv_kernel_dim": 3},
        {"linear_allow_neg_eigval": False},
        {"layer_types": _LAYERS},
        {"rope_parameters.rope_theta": 300.0},
        {"rms_norm_eps": 0.1},
        {"attention_bias": True},
    ],
    "kimi-linear": [
        {"linear_attn_config.head_dim": 12},
        {"linear_attn_config.num_heads": 3},
        {"linear_attn_config.short_conv_kernel_size": 4},
        {"linear_attn_config.kda_layers": [1, 3, 4], "linear_attn_config.full_attn_layers": [2]},
        {"num_experts_per_token": 2},
        {"num_expert_group": 3, "topk_group": 2},
        {"num_shared_experts": 1},
        {"moe_renormalize": False},
        {"routed_scaling_factor": 1.3},
        {"first_k_dense_replace": 1},
        {"q_lora_rank": 20},
        {"qk_rope_head_dim": 4},
        {"attention_bias": True, "q_lora_rank": 20},
    ],
    "nemotron-h": [
        {"layer_norm_epsilon": 0.1},
        {"n_groups": 3},
        {"ssm_state_size": 16},
        {"conv_kernel": 3},
        {"use_conv_bias": False},
        {"use_bias": True},
        {"mlp_bias": True},
        {"mlp_hidden_act": "silu"},
        {"mamba_head_dim": 16},
    ],
    "nemotron-3": [
        {"num_experts_per_tok": 2},
        {"n_group": 2},
        {"topk_group": 3},
        {"norm_topk_prob": False},
        {"routed_scaling_factor": 1.3},
        {"moe_shared_expert_intermediate_size": 32},
    ],
}
