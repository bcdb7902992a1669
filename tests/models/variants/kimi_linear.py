"""Kimi Linear: the delta rule with a decay for each number of a key, latent attention that rotates nothing, experts."""

from __future__ import annotations

from typing import Any

from tests.models.variants.qwen_next import steady
from tests.models.variants.variant import Variant

LATENT: dict[str, Any] = {
    "head_dim": None, "num_key_value_heads": 6, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "max_position_embeddings": None, "model_max_length": 512,
}  # fmt: skip
LINEAR: dict[str, Any] = {
    "linear_attn_config": {
        "head_dim": 16, "num_heads": 6, "short_conv_kernel_size": 3, "kda_layers": [1, 2, 4], "full_attn_layers": [3],
    },
    "num_hidden_layers": 4, "rms_norm_eps": 5e-2,
}  # fmt: skip
MOE: dict[str, Any] = {
    "num_experts": 6, "num_experts_per_token": 3, "moe_intermediate_size": 24, "num_shared_experts": 2,
    "routed_scaling_factor": 1.7, "first_k_dense_replace": 2,
}  # fmt: skip
VARIANTS = {
    "kimi-linear": Variant("KimiLinear", {**LATENT, **LINEAR, **MOE}, is_loose=True, one_by_one=True, patch=steady),
}
