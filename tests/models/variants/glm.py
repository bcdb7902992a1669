"""GLM-4-9B-chat-hf (Glm) and GLM-4 0414 (Glm4: two norms more in a block)."""

from __future__ import annotations

from tests.models.variants.variant import Variant, rope

HALF = rope(partial_rotary_factor=0.5)

VARIANTS = {
    "glm-4-9b-chat": Variant("Glm", {**HALF, "rms_norm_eps": 1e-3, "attention_bias": True}),
    "glm-no-bias-tied": Variant(
        "Glm", {**rope(theta=5e4, partial_rotary_factor=0.25), "attention_bias": False, "tie_word_embeddings": True}
    ),
    "glm-4-0414": Variant("Glm4", {**HALF, "rms_norm_eps": 1e-3, "attention_bias": False}),
    "glm-4-0414-bias": Variant("Glm4", {**rope(partial_rotary_factor=0.75), "num_key_value_heads": 1}),
}
