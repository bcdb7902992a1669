"""Granite: Llama with multipliers of embedding, residual, attention and logits."""

from __future__ import annotations

from tests.models.variants.variant import NO_HEAD_DIM, Variant, rope

MULTIPLIERS = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.44, "attention_multiplier": 0.31, "logits_scaling": 0.7,
}  # fmt: skip

VARIANTS = {
    "granite": Variant("Granite", {**NO_HEAD_DIM, **MULTIPLIERS, **rope(theta=1e6), "tie_word_embeddings": True}),
    "granite-untied-bias": Variant(
        "Granite", {**NO_HEAD_DIM, **MULTIPLIERS, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}
    ),
}
