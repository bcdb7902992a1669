"""SmolLM3, Seed-OSS, ERNIE 4.5 with and without experts, PaddleOCR-VL, EXAONE 4 and 4.5, and Cohere's models."""

from __future__ import annotations

from typing import Any

from tests.models.variants.variant import COMMON, NO_HEAD_DIM, Variant, rope

ERNIE_MOE: dict[str, Any] = {
    **NO_HEAD_DIM, "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "moe_num_shared_experts": 2,
    "rms_norm_eps": 1e-4,
}  # fmt: skip
LLAMA3 = {"factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 48}

COHERE: dict[str, Any] = {**NO_HEAD_DIM, **rope(theta=8e3), "layer_norm_eps": 1e-3, "logit_scale": 0.6}
COHERE_TEXT = {**{name: value for name, value in {**COMMON, **COHERE}.items() if value is not None},
               "model_type": "cohere2"}  # fmt: skip

VARIANTS = {
    "command-r": Variant("Cohere", {**COHERE, "num_key_value_heads": 6}),
    "command-r-plus": Variant("Cohere", {**COHERE, "use_qk_norm": True}),
    "command-r-bias-untied": Variant("Cohere", {**COHERE, "attention_bias": True, "tie_word_embeddings": False}),
    "command-r7b": Variant("Cohere2", {**COHERE, "sliding_window": 20, "num_hidden_layers": 4}),
    # transformers leaves out logit_scale here.
    "command-a-vision": Variant(
        "Cohere2Vision",
        {
            **dict.fromkeys(COMMON),
            "text_config": {**COHERE_TEXT, "sliding_window": 20, "num_hidden_layers": 4, "logit_scale": 1.0},
            "vision_config": {
                "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6,
                "image_size": 24, "patch_size": 4, "layer_norm_eps": 1e-3, "model_type": "siglip_vision_model",
                "vision_use_head": False,
            },
            "image_token_id": 190, "alignment_intermediate_size": 52,
        },
    ),
    "smollm3": Variant("SmolLM3", {**NO_HEAD_DIM, **rope(theta=5e6), "num_hidden_layers": 4}),
    "smollm3-window": Variant(
        "SmolLM3",
        {
            **NO_HEAD_DIM, "no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 21,
            "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False,
        },
    ),
    "seed-oss": Variant("SeedOss", {**rope(theta=1e7), "rms_norm_eps": 1e-4}),
    "seed-oss-biases": Variant(
        "SeedOss",
        {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "ernie-4.5": Variant("Ernie4_5", {**rope(theta=5e5), "rms_norm_eps": 1e-4}),
    "ernie-4.5-bias": Variant(
        "Ernie4_5", {"use_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 3}
    ),
    "ernie-4.5-moe": Variant("Ernie4_5_Moe", {**ERNIE_MOE, **rope(theta=5e5)}, is_loose=True),
    "ernie-4.5-moe-few": Variant(
        "Ernie4_5_Moe",
        {
            **ERNIE_MOE, "moe_layer_interval": 2, "moe_layer_end_index": 2, "num_hidden_layers": 4,
            "moe_num_shared_experts": 0, "tie_word_embeddings": False,
        },
        is_loose=True,
    ),
    # A square of 5 x 5 learned positions.
    "paddleocr-vl": Variant(
        "PaddleOCRVL",
        {
            **dict.fromkeys(COMMON),
            "text_config": {
                **COMMON, **rope(theta=5e4, mrope_section=[2, 3, 3]), "rms_norm_eps": 1e-4, "use_bias": True,
                "tie_word_embeddings": False,
            },
            "vision_config": {
                "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6,
                "image_size": 20, "patch_size": 4, "layer_norm_eps": 1e-3, **rope("axial", 5e3),
            },
            "image_token_id": 190, "tie_word_embeddings": False,
        },
    ),
    "exaone-4-32b": Variant(
        "Exaone4",
        {**rope("llama3", 1e6, **LLAMA3), "sliding_window": 20, "num_hidden_layers": 4, "rms_norm_eps": 1e-4},
    ),
    "exaone-4-1.2b": Variant(
        "Exaone4",
        {**rope(theta=1e6), "layer_types": ["full_attention"] * 3, "tie_word_embeddings": True},
        nulls=("sliding_window",),
    ),
    # Heads of queries in pairs; windows of 2 x 2 rows of the output, in all blocks but one.
    "exaone-4.5": Variant(
        "Exaone4_5_",
        {
            **dict.fromkeys(COMMON),
            "text_config": {
                **COMMON, **rope(theta=1e6), "sliding_window": 20, "num_hidden_layers": 4, "rms_norm_eps": 1e-4,
                "model_type": "exaone4",
            },
            "vision_config": {
                "depth": 3, "hidden_size": 48, "num_heads": 6, "num_key_value_heads": 3, "patch_size": 4,
                "intermediate_size": 40, "window_size": 16, "fullatt_block_indexes": [1], "out_hidden_size": 48,
                **rope("axial", 5e3),
            },
            "image_token_id": 190, "video_token_id": 191,
        },
    ),
}  # fmt: skip
