"""Tiny models of 2026 whose GGUF files lie in `files/`: see models.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tests.models.variants import VARIANTS

# Rows have to be a multiple of 32 for Q8_0.
SIZES: Final = {"vocab_size": 97, "num_hidden_layers": 2, "intermediate_size": 96}
WIDE: Final = {"hidden_size": 96}
_LATENT: Final = {
    **WIDE, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 16, "moe_intermediate_size": 32,
}  # fmt: skip
_SMALL: Final = {"moe_intermediate_size": 32}
# The converter knows decays with a bound only, and no layers without experts behind others that have some.
_LING: Final = {
    **_LATENT,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "kda_safe_gate": True,
    "first_k_dense_replace": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "linear_head_dim": 16,
}


def _text_part(name: str, **entries: Any) -> Mapping[str, Any]:
    """Entries for the text part of a model of which files hold nothing else."""
    return {"text_config": {**VARIANTS[name].entries["text_config"], **SIZES, **WIDE, **entries}}


# Variant -> entries that differ from it, as in models.MODELS.
MODELS_2026: Final[Mapping[str, Mapping[str, Any]]] = {
    "ling-3-flash": {**_LING, "num_hidden_layers": 3, "layer_group_size": 3},
    "ling-3-tiny": {
        **_LING,
        "num_hidden_layers": 3,
        "q_lora_rank": 32,
        "expert_swiglu_limit_list": [0, 5, 4],
        "share_expert_swiglu_limit_list": [0, 7, 5],
        "norm_topk_prob": True,
    },
    "kimi-linear": {
        **_LATENT,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "linear_attn_config": {},
        **{"linear_head_dim": 16, "linear_num_heads": 6, "linear_conv_kernel_dim": 3},
        "num_experts": 4,
        "num_experts_per_token": 2,
        "first_k_dense_replace": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "step-3.7": _text_part(
        "step-3.7",
        num_hidden_layers=4,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        moe_layers_enum="1,2,3",
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        share_expert_dim=64,
        swiglu_limits=[0.0, 0.0, 7.0, 16.0],
        swiglu_limits_shared=[7.0, 0.0, 16.0, 7.0],
        rope_theta=[2e3, 1e3, 1e3, 2e3],
        partial_rotary_factors=[0.5, 1.0, 1.0, 0.5],
    ),
    # Files have one number that turns in all layers, and no factor of experts.
    "mimo-v2-flash": {
        **WIDE,
        **_SMALL,
        **{"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "head_dim": 32},
        "num_hidden_layers": 4,
        "routed_scaling_factor": 1.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.38},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3e3, "partial_rotary_factor": 0.38},
        },
    },
    "laguna-xs": {
        **WIDE,
        **_SMALL,
        "num_hidden_layers": 4,
        **{"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 64},
    },
    # llama.cpp knows no bias of outputs.
    "laguna-m": {
        **WIDE,
        **_SMALL,
        "sliding_window": 0,
        **{"num_hidden_layers": 3, "attention_bias": False, "num_experts": 4, "num_experts_per_tok": 2},
        "shared_expert_intermediate_size": 64,
    },
}
