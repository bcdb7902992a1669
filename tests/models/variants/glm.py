"""GLM-4-9B-chat-hf (Glm), GLM-4 0414 (Glm4: two norms more in a block), GLM-4.5 and its Air, GLM-4.7-Flash (latent)."""

from __future__ import annotations

from tests.models.variants.deepseek import EXPERTS, GROUPS, LATENT
from tests.models.variants.variant import Variant, rope

HALF = rope(partial_rotary_factor=0.5)
MOE = {**EXPERTS, "n_shared_experts": 1, "rms_norm_eps": 1e-4}

VARIANTS = {
    "glm-4-9b-chat": Variant("Glm", {**HALF, "rms_norm_eps": 1e-3, "attention_bias": True}),
    "glm-no-bias-tied": Variant(
        "Glm", {**rope(theta=5e4, partial_rotary_factor=0.25), "attention_bias": False, "tie_word_embeddings": True}
    ),
    "glm-4-0414": Variant("Glm4", {**HALF, "rms_norm_eps": 1e-3, "attention_bias": False}),
    "glm-4-0414-bias": Variant("Glm4", {**rope(partial_rotary_factor=0.75), "num_key_value_heads": 1}),
    "glm-4.5": Variant(
        "Glm4Moe", {**MOE, **rope(theta=1e6, partial_rotary_factor=0.5), "attention_bias": True, "use_qk_norm": True},
        is_loose=True,
    ),
    "glm-4.5-air": Variant(
        "Glm4Moe",
        {**MOE, **GROUPS, **HALF, "norm_topk_prob": False, "num_key_value_heads": 3, "n_shared_experts": 2},
        is_loose=True,
    ),
    "glm-4.7-flash": Variant(
        "Glm4MoeLite", {**LATENT, **MOE, **rope(theta=1e6), "first_k_dense_replace": None}, is_loose=True
    ),
    "glm-4-moe-lite-groups": Variant(
        "Glm4MoeLite",
        {
            **LATENT, **MOE, **GROUPS, "first_k_dense_replace": None, "rope_interleave": False, "attention_bias": True,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
        nulls=("q_lora_rank",), is_loose=True,
    ),
}  # fmt: skip
