"""Mistral v0.1 (sliding window), v0.2, v0.3, Nemo (heads of any size), Small 3.1; Ministral 8B and 3; Mixtral."""

from __future__ import annotations

from tests.models.variants.deepseek import V3
from tests.models.variants.variant import COMMON, NO_HEAD_DIM, Variant, rope

EXPERTS = {"num_local_experts": 7, "num_experts_per_tok": 3, "rms_norm_eps": 1e-4}

PIXTRAL = {
    "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6, "head_dim": 8,
    "image_size": 160, "patch_size": 4, "model_type": "pixtral", "rope_theta": 100.0,
}  # fmt: skip

MINISTRAL = rope(
    "yarn", 1e6, factor=4.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=1.0,
    llama_4_scaling_beta=0.5,
)  # fmt: skip

VARIANTS = {
    "mistral-v0.1": Variant("Mistral", {**NO_HEAD_DIM, "sliding_window": 24, "rms_norm_eps": 1e-5}),
    "mistral-v0.3": Variant("Mistral", {**NO_HEAD_DIM, **rope(theta=1e6), "rms_norm_eps": 1e-4}),
    "mistral-nemo": Variant("Mistral", {"head_dim": 24, **rope(theta=1e6), "num_key_value_heads": 3}),
    "mistral-short-window": Variant("Mistral", {"sliding_window": 5, "num_key_value_heads": 1}),
    "ministral-8b": Variant(
        "Ministral",
        {
            **rope(theta=1e6), "sliding_window": 24, "num_key_value_heads": 3, "rms_norm_eps": 1e-4,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "mistral-small-3.1": Variant(
        "Mistral3",
        {
            **dict.fromkeys(COMMON),
            "text_config": {**COMMON, **rope(theta=1e6), "sliding_window": None, "model_type": "mistral"},
            "vision_config": PIXTRAL, "image_token_index": 190, "tie_word_embeddings": False,
        },
    ),
    "lighton-ocr": Variant(
        "LightOnOcr",
        {
            **dict.fromkeys(COMMON),
            "text_config": {**COMMON, **rope(theta=1e6), "rms_norm_eps": 1e-4, "model_type": "qwen3"},
            "vision_config": {**PIXTRAL, "hidden_act": "silu"}, "image_token_id": 190, "tie_word_embeddings": True,
        },
    ),
    "pixtral-12b": Variant(
        "Llava",
        {
            **dict.fromkeys(COMMON),
            "text_config": {**COMMON, **rope(theta=1e6), "sliding_window": None, "model_type": "mistral"},
            "vision_config": {**PIXTRAL, "hidden_act": "silu"}, "image_token_index": 190, "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full", "multimodal_projector_bias": True,
        },
    ),
    "ministral-3": Variant("Ministral3", {**MINISTRAL, "sliding_window": None}),
    "ministral-3-window": Variant(
        "Ministral3", {**MINISTRAL, "sliding_window": 50, "tie_word_embeddings": True, "num_key_value_heads": 1}
    ),
    "ministral-3-multimodal": Variant(
        "Mistral3",
        {
            **dict.fromkeys(COMMON), "text_config": {**COMMON, **MINISTRAL, "model_type": "ministral3"},
            "vision_config": {**PIXTRAL, "hidden_act": "silu"}, "image_token_index": 190, "tie_word_embeddings": True,
            "multimodal_projector_bias": True, "projector_hidden_act": "gelu_pytorch_tanh", "spatial_merge_size": 3,
        },
    ),
    "mistral-small-4": Variant(
        "Mistral3",
        {
            **dict.fromkeys(COMMON),
            "text_config": {
                **{name: value for name, value in {**COMMON, **V3}.items() if value is not None},
                "n_group": 1, "topk_group": 1, "model_type": "mistral4",
                **rope(
                    "yarn", 1e4, factor=4.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=1.0,
                    llama_4_scaling_beta=0.1,
                ),
            },
            "vision_config": {**PIXTRAL, "hidden_act": "silu"}, "image_token_index": 190, "tie_word_embeddings": False,
            "spatial_merge_size": 2,
        },
        is_loose=True,
    ),
    "mixtral": Variant("Mixtral", {**NO_HEAD_DIM, **EXPERTS, **rope(theta=1e6)}, is_loose=True),
    "mixtral-window": Variant("Mixtral", {**EXPERTS, "sliding_window": 19, "num_experts_per_tok": 1}, is_loose=True),
}  # fmt: skip
