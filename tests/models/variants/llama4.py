"""Llama 4: attention in chunks, queries scaled by position, norms without weights, experts whose inputs are weighed."""

from __future__ import annotations

from typing import Any

from tests.models.variants.variant import COMMON, Variant, rope

_LLAMA3 = {
    "factor": 5.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0, "original_max_position_embeddings": 60,
}  # fmt: skip
SIZES: dict[str, Any] = {"intermediate_size": 40, "intermediate_size_mlp": 88, "num_hidden_layers": 4}

VARIANTS = {
    "llama4-scout": Variant(
        "Llama4Text",
        {
            **SIZES, **rope("llama3", 5e3, **_LLAMA3), "attention_chunk_size": 21, "num_local_experts": 5,
            "floor_scale": 9, "attn_scale": 0.3, "rms_norm_eps": 1e-3,
        },
        is_loose=True,
    ),
    "llama4-maverick": Variant(
        "Llama4",
        {
            "text_config": {
                **COMMON, **SIZES, **rope(theta=2e3), "attention_chunk_size": 32, "num_local_experts": 7,
                "num_experts_per_tok": 2, "interleave_moe_layer_step": 2, "use_qk_norm": False, "floor_scale": 20,
                "attention_bias": True, "no_rope_layers": [1, 0, 1, 1], "rms_norm_eps": 1e-4,
            },
            "vision_config": {
                "hidden_size": 48, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 6,
                "image_size": 24, "patch_size": 4, "vision_output_dim": 52, "projector_input_dim": 52,
                "projector_output_dim": 52, **rope(theta=40.0),
            },
            "image_token_index": 190,
        },
        is_loose=True,
    ),
}  # fmt: skip
