"""GPT-2: learned positions, one tensor for queries, keys and values, transposed weights."""

from __future__ import annotations

from typing import Any

from tests.models.variants.variant import COMMON, Variant

GPT2: dict[str, Any] = {
    **dict.fromkeys(COMMON), "vocab_size": 193, "n_embd": 96, "n_layer": 3, "n_head": 6, "n_positions": 160,
    "layer_norm_epsilon": 1e-3, "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip

VARIANTS = {
    "gpt2": Variant("GPT2", GPT2),
    "gpt2-scaled-by-layer": Variant(
        "GPT2",
        {**GPT2, "scale_attn_by_inverse_layer_idx": True, "n_inner": 80, "activation_function": "gelu"},
    ),
}
