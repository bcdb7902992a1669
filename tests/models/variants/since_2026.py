"""Mellum 2, Command A+ and North Mini, Laguna, Flint, Step 3.7, MiMo-V2-Flash."""

from __future__ import annotations

import torch
from torch import nn

from tests.models.variants.variant import COMMON, Variant

YARN = {
    "rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 40,
    "attention_factor": 1.1, "beta_fast": 16.0, "beta_slow": 1.0,
}  # fmt: skip

COHERE = {
    "num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24, "num_hidden_layers": 4, "sliding_window": 20,
    "expert_selection_fn": "sigmoid", "rope_theta": 5e4,
}  # fmt: skip


@torch.no_grad()
def _beyond_bounds(model: nn.Module) -> None:
    """Make the factors of gated products reach their bounds."""
    for name, weight in model.named_parameters():
        if "language_model" in name and name.endswith(("gate_up_proj", "gate_proj.weight", "up_proj.weight")):
            weight.mul_(1.5)
        elif "language_model" in name and name.endswith("post_attention_layernorm.weight"):
            weight.sub_(2.0)


@torch.no_grad()
def _with_sinks(model: nn.Module) -> None:
    """Make the sinks as large as scores."""
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):
            weight.uniform_(-1, 4)


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
    "flint": Variant(
        "Flint",
        {
            "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "rms_norm_eps": 1e-4,
            "shared_expert_intermediate_size": 40, "num_hidden_layers": 5, "sliding_window": 20,
            "rope_parameters": {"rope_type": "default", "rope_theta": 3e3},
        },
        patch=_with_sinks,
        is_loose=True,
    ),
    "step-3.7": Variant(
        "Step3p7",
        {
            "text_config": {
                **COMMON, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
                "share_expert_dim": 40, "num_hidden_layers": 5, "moe_layers_enum": "1,2,3,4", "sliding_window": 20,
                "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
                "attention_other_setting": {"num_attention_heads": 8}, "rms_norm_eps": 1e-3,
                "moe_router_scaling_factor": 1.7, "swiglu_limits": [0.0, 0.0, 7.0, 7.0, 16.0],
                "swiglu_limits_shared": [7.0, 0.0, 0.0, 16.0, 7.0], "rope_theta": [5e3, 1e3, 1e3, 1e3, 5e3],
                "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 0.5],
                "rope_scaling": {
                    "rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 8.0,
                    "original_max_position_embeddings": 60,
                },
            },
            "vision_config": {
                "width": 16, "layers": 1, "heads": 2, "image_size": 28, "patch_size": 14, "mlp_ratio": 2.0,
            },
        },
        patch=_beyond_bounds,
        is_loose=True,
    ),
    "mimo-v2-flash": Variant(
        "MiMoV2Flash",
        {
            "n_routed_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 20, "rms_norm_eps": 1e-3,
            "head_dim": 24, "v_head_dim": 16, "num_key_value_heads": 1, "num_hidden_layers": 4, "sliding_window": 22,
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
            "routed_scaling_factor": 1.3, "n_group": 4, "topk_group": 2, "attention_value_scale": 0.8,
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.334},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e3, "partial_rotary_factor": 0.5},
            },
        },
        patch=_with_sinks,
        is_loose=True,
    ),
}  # fmt: skip
