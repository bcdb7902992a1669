"""Gemma, Gemma-2, Gemma-3, and the text part of multimodal Gemma-3."""

from __future__ import annotations

from typing import Any

from tests.models.variants.variant import COMMON, Variant, rope

GEMMA2: dict[str, Any] = {
    "sliding_window": 21, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0,
    "num_hidden_layers": 4, "rms_norm_eps": 1e-3,
}  # fmt: skip


def gemma3(global_rope: dict[str, Any], *, local_theta: float = 1e3, **entries: Any) -> dict[str, Any]:
    local = rope(theta=local_theta)["rope_parameters"]
    return {
        "rope_parameters": {"sliding_attention": local, "full_attention": global_rope["rope_parameters"]},
        "sliding_window": 18, "query_pre_attn_scalar": 20, "num_hidden_layers": 7, **entries,
    }  # fmt: skip


# Squares of 3 x 3 patches become a token, and an image has 4 x 4 of them.
VISION = {
    "hidden_size": 60, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 6, "image_size": 48,
    "patch_size": 4, "model_type": "siglip_vision_model", "vision_use_head": False,
}  # fmt: skip

VARIANTS = {
    "gemma-2b": Variant("Gemma", {**rope(), "head_dim": 24, "num_key_value_heads": 1, "rms_norm_eps": 1e-3}),
    "gemma-7b": Variant("Gemma", {"num_key_value_heads": 6, **rope(theta=2e4)}),
    "gemma-untied-bias": Variant("Gemma", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma-2": Variant("Gemma2", GEMMA2),
    "gemma-2-uncapped": Variant(
        "Gemma2", {**GEMMA2, "attn_logit_softcapping": None, "query_pre_attn_scalar": 24, "num_key_value_heads": 3}
    ),
    "vaultgemma": Variant("VaultGemma", {**GEMMA2, **rope(theta=2e4), "query_pre_attn_scalar": 30}),
    "gemma-3-1b": Variant(
        "Gemma3Text", gemma3(rope("linear", 1e5, factor=4.0), num_key_value_heads=1, rms_norm_eps=1e-3)
    ),
    "gemma-3-pattern": Variant(
        "Gemma3Text", gemma3(rope(theta=1e6), sliding_window_pattern=2, num_hidden_layers=4, head_dim=24)
    ),
    "gemma-3-multimodal": Variant(
        "Gemma3",
        {
            **dict.fromkeys(COMMON),
            "text_config": {**COMMON, **gemma3(rope("linear", 1e6, factor=8.0), sliding_window_pattern=3)},
            "vision_config": VISION, "mm_tokens_per_image": 16, "boi_token_index": 190, "eoi_token_index": 191,
            "image_token_index": 192,
        },
    ),
}  # fmt: skip
