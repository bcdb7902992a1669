"""Arcee and Nemotron, whose MLPs have no gate."""

from __future__ import annotations

from tests.models.variants.variant import NO_HEAD_DIM, Variant, rope

VARIANTS = {
    "arcee": Variant("Arcee", {**rope(theta=5e4), "rms_norm_eps": 1e-4}),
    "arcee-bias-tied": Variant(
        "Arcee",
        {
            **rope("yarn", 1e3, factor=4.0, original_max_position_embeddings=40), "attention_bias": True,
            "mlp_bias": True, "tie_word_embeddings": True, "hidden_act": "silu",
        },
    ),
    "nemotron": Variant("Nemotron", {**rope(theta=5e4, partial_rotary_factor=0.5), "norm_eps": 1e-3}),
    "nemotron-bias": Variant(
        "Nemotron",
        {
            **NO_HEAD_DIM, **rope(partial_rotary_factor=0.25), "attention_bias": True, "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}  # fmt: skip
