"""Trinity, K-EXAONE, Solar Open, InternLM3, IQuest-Coder and Helium."""

from __future__ import annotations

from typing import Any

from tests.models.variants.deepseek import EXPERTS
from tests.models.variants.variant import NO_HEAD_DIM, Variant, rope

MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "rms_norm_eps": 1e-4}
WINDOW: dict[str, Any] = {"sliding_window": 20, "num_hidden_layers": 4}
EXAONE: dict[str, Any] = {**MOE, **rope(theta=1e6), "routed_scaling_factor": 1.7}

VARIANTS = {
    "trinity-mini": Variant(
        "Afmoe", {**MOE, **WINDOW, **rope(theta=5e4), "route_scale": 1.7, "mup_enabled": True}, is_loose=True
    ),
    "trinity-dense": Variant(
        "Afmoe",
        {
            **MOE, **WINDOW, "num_dense_layers": 2, "num_shared_experts": 1, "global_attn_every_n_layers": 2,
            "attention_bias": True, "tie_word_embeddings": True,
        },
        is_loose=True,
    ),
    "k-exaone": Variant("ExaoneMoe", {**EXAONE, **WINDOW}, is_loose=True),
    "k-exaone-groups": Variant(
        "ExaoneMoe",
        {
            **EXAONE, "sliding_window": 30, "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse"], "n_group": 4, "topk_group": 2, "num_shared_experts": 2,
            "norm_topk_prob": False, "tie_word_embeddings": True,
        },
        is_loose=True,
    ),
    "solar-open": Variant(
        "SolarOpen",
        {**EXPERTS, **rope(theta=5e4), "first_k_dense_replace": None, "intermediate_size": None, "rms_norm_eps": 1e-4},
        is_loose=True,
    ),
    "internlm3": Variant("InternLM3", {**rope(theta=5e4), "rms_norm_eps": 1e-4}),
    "internlm3-bias": Variant("InternLM3", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "iquest-coder": Variant("IQuestCoder", {**rope(theta=5e5), "num_key_value_heads": 3}),
    "helium": Variant("Helium", {**NO_HEAD_DIM, "head_dim": 16, **rope(theta=5e4), "rms_norm_eps": 1e-4}),
    "helium-bias": Variant(
        "Helium",
        {**NO_HEAD_DIM, "head_dim": 16, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
}  # fmt: skip
