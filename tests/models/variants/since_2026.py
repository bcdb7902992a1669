"""Mellum 2, Command A+ and North Mini, Laguna."""

from __future__ import annotations

from tests.models.variants.variant import Variant

YARN = {
    "rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 40,
    "attention_factor": 1.1, "beta_fast": 16.0, "beta_slow": 1.0,
}  # fmt: skip

COHERE = {
    "num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24, "num_hidden_layers": 4, "sliding_window": 20,
    "expert_selection_fn": "sigmoid", "rope_theta": 5e4,
}  # fmt: skip

VARIANTS = {
    "mellum-2": Variant(
        "Mellum",
        {
            "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "rms_norm_eps": 1e-4,
            "num_hidden_layers": 4, "sliding_window": 19, "layer_types": [*["sliding_attention"] * 3, "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "norm_topk_prob": True,
            "rope_parameters": {
                "full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
            },
        },
        is_loose=True,
    ),
    "command-a-plus": Variant(
        "Cohere2Moe", {**COHERE, "num_shared_experts": 2, "layer_norm_eps": 1e-3, "logit_scale": 0.8}, is_loose=True
    ),
    "north-mini": Variant(
        "Cohere2Moe",
        {
            **COHERE, "norm_topk_prob": False, "first_k_dense_replace": 1, "prefix_dense_intermediate_size": 40,
            "num_hidden_layers": 5, "rms_norm_eps": 1e-3, "logit_scale": 0.8,
        },
        is_loose=True,
    ),
    "laguna-xs": Variant(
        "Laguna",
        {
            "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "rms_norm_eps": 1e-4,
            "shared_expert_intermediate_size": 40, "moe_routed_scaling_factor": 1.7, "num_hidden_layers": 4,
            "sliding_window": 21, "layer_types": ["full_attention", *["sliding_attention"] * 3],
            "num_attention_heads_per_layer": [4, 6, 8, 6], "gating": "per-head",
            "rope_parameters": {
                "full_attention": {**YARN, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e3, "partial_rotary_factor": 0.75},
            },
        },
        is_loose=True,
    ),
    "laguna-m": Variant(
        "Laguna",
        {
            "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "gating": "per-element",
            "mlp_layer_types": ["dense", "dense", "sparse"], "attention_bias": True,
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e4}},
        },
        is_loose=True,
    ),
}  # fmt: skip
