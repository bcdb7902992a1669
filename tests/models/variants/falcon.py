"""Falcon 7B (one key head), 40B (groups of heads, two norms) and 11B (one norm)."""

from __future__ import annotations

from typing import Any

from tests.models.variants.variant import NO_HEAD_DIM, Variant, rope

FALCON: dict[str, Any] = {
    **NO_HEAD_DIM, "num_key_value_heads": None, "intermediate_size": None, "layer_norm_epsilon": 1e-3,
}  # fmt: skip
NEW: dict[str, Any] = {**FALCON, "new_decoder_architecture": True}

VARIANTS = {
    "falcon-7b": Variant("Falcon", {**FALCON, **rope(theta=5e4)}),
    "falcon-40b": Variant("Falcon", {**NEW, "num_kv_heads": 2, "ffn_hidden_size": 80, "bias": True}),
    "falcon-11b": Variant(
        "Falcon", {**NEW, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1, "tie_word_embeddings": False}
    ),
}
