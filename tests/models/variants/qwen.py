"""Qwen2, Qwen2.5, QwQ, R1-Distill-Qwen; Qwen3; Qwen2-MoE (shared expert); Qwen3-MoE; Qwen2-VL, 2.5-VL and 3-VL."""

from __future__ import annotations

from typing import Any

from tests.models.variants.variant import COMMON, NO_HEAD_DIM, Variant, rope

YARN = rope("yarn", 1e6, factor=4.0, original_max_position_embeddings=32)
WINDOW = {"use_sliding_window": True, "sliding_window": 20, "num_hidden_layers": 4}
QWEN2_MOE = {
    **NO_HEAD_DIM, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}  # fmt: skip
QWEN3_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}


def vision(text: dict[str, Any], sections: list[int], **entries: Any) -> dict[str, Any]:
    """A model that also sees images. sections: the pairs that turn with time, row and column."""
    text = {**COMMON, **text}
    turned = {**text.pop("rope_parameters", rope(theta=1e6)["rope_parameters"]), "mrope_section": sections}
    text_config = {name: value for name, value in text.items() if value is not None}
    vision_config = {**VISION, "out_hidden_size": text["hidden_size"], **entries.pop("vision_config", {})}
    return {
        **dict.fromkeys(COMMON), "text_config": {**text_config, "rope_parameters": turned},
        "vision_config": vision_config, "image_token_id": 190, "video_token_id": 191, "vision_start_token_id": 188,
        "vision_end_token_id": 189, **entries,
    }  # fmt: skip


# A square of 5 x 5 learned positions; in Qwen2.5-VL windows of 2 x 2 rows of the output, in all blocks but one.
VISION = {
    "depth": 3, "hidden_size": 48, "embed_dim": 48, "num_heads": 6, "patch_size": 4, "intermediate_size": 40,
    "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 25, "window_size": 16,
    "fullatt_block_indexes": [1],
}  # fmt: skip

# InternVL's encoder: tiles of 24 x 24 pixels are 3 x 3 tokens.
INTERN = {
    "hidden_size": 60, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 6,
    "image_size": [24, 24], "patch_size": [4, 4], "layer_norm_eps": 1e-3, "attention_bias": True,
}  # fmt: skip
WHOLE = dict.fromkeys(COMMON)
QWEN2 = {**COMMON, "hidden_size": 96, **rope(theta=1e6), "model_type": "qwen2"}

VARIANTS = {
    "qwen2": Variant("Qwen2", {**NO_HEAD_DIM, **rope(theta=1e6), "rms_norm_eps": 1e-4}),
    "qwen2.5-tied": Variant("Qwen2", {**NO_HEAD_DIM, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwq-yarn": Variant("Qwen2", {**NO_HEAD_DIM, **YARN, "num_key_value_heads": 3}),
    "r1-distill-qwen": Variant("Qwen2", {**NO_HEAD_DIM, "num_key_value_heads": 6, "rms_norm_eps": 1e-5}),
    "qwen2-window": Variant("Qwen2", {**NO_HEAD_DIM, **WINDOW, "max_window_layers": 2}),
    "qwen2-unused-window": Variant("Qwen2", {**NO_HEAD_DIM, **WINDOW, "use_sliding_window": False}),
    "qwen3": Variant("Qwen3", {"head_dim": 32, **rope(theta=1e6)}),
    "qwen3-tied-bias": Variant("Qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-yarn": Variant("Qwen3", {**YARN, "rms_norm_eps": 1e-3}),
    "qwen3-window": Variant("Qwen3", {**WINDOW, "max_window_layers": 1}),
    # Images of 3 x 3 patches, and 2 pixels that are not seen; pictures of more than two tiles are shrunk.
    "llava-onevision": Variant(
        "LlavaOnevision",
        {
            **WHOLE,
            "text_config": QWEN2,
            "vision_config": {
                "hidden_size": 48,
                "intermediate_size": 40,
                "num_hidden_layers": 3,
                "num_attention_heads": 6,
                "image_size": 14,
                "patch_size": 4,
                "layer_norm_eps": 1e-3,
                "model_type": "siglip_vision_model",
                "vision_use_head": False,
            },
            "image_token_index": 190,
            "video_token_index": 191,
            "vision_aspect_ratio": "anyres_max_2",
            "image_grid_pinpoints": [[14 * rows, 14 * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)],
        },
    ),
    "qwen2-vl": Variant(
        "Qwen2VL", vision({**NO_HEAD_DIM, "rms_norm_eps": 1e-4}, [2, 3, 3], vision_config={"hidden_size": 96})
    ),
    "qwen2.5-vl-window": Variant(
        "Qwen2_5_VL",
        vision({**NO_HEAD_DIM, **WINDOW, **YARN, "max_window_layers": 2}, [2, 3, 3], tie_word_embeddings=True),
    ),
    "qwen3-vl": Variant("Qwen3VL", vision({"attention_bias": True}, [4, 2, 2], tie_word_embeddings=True)),
    "qwen3-vl-moe": Variant(
        "Qwen3VLMoe",
        vision(
            {**QWEN3_MOE, "moe_intermediate_size": 20, "mlp_only_layers": [1], "norm_topk_prob": True},
            [4, 2, 2],
            tie_word_embeddings=False,
        ),
        is_loose=True,
    ),
    "internvl": Variant(
        "InternVL",
        {
            **WHOLE,
            "text_config": QWEN2,
            "vision_config": INTERN,
            "image_token_id": 190,
            "image_seq_length": 9,
            "tie_word_embeddings": True,
        },
    ),
    # With the encoder of 6 billion parameters: 32 x 32 pixels are 2 x 2 tokens.
    "internvl-6b-moe": Variant(
        "InternVL",
        {
            **WHOLE,
            "text_config": {**COMMON, **QWEN3_MOE, **rope(theta=1e6), "model_type": "qwen3_moe"},
            "vision_config": {
                **INTERN,
                "image_size": [32, 32],
                "attention_bias": False,
                "norm_type": "rms_norm",
                "use_qk_norm": True,
                "use_mean_pooling": False,
                "hidden_act": "gelu_pytorch_tanh",
            },
            "image_token_id": 190,
            "image_seq_length": 4,
            "downsample_ratio": 0.25,
            "tie_word_embeddings": False,
        },
        is_loose=True,
    ),
    "qwen2-moe": Variant("Qwen2Moe", QWEN2_MOE, is_loose=True),
    "qwen2-moe-normed": Variant("Qwen2Moe", {**QWEN2_MOE, "norm_topk_prob": True, "qkv_bias": False}, is_loose=True),
    "qwen2-moe-sparse-step": Variant(
        "Qwen2Moe", {**QWEN2_MOE, "decoder_sparse_step": 2, "num_hidden_layers": 4}, is_loose=True
    ),
    "qwen2-moe-dense-layers": Variant("Qwen2Moe", {**QWEN2_MOE, "mlp_only_layers": [0, 2]}, is_loose=True),
    "qwen2-moe-window": Variant("Qwen2Moe", {**QWEN2_MOE, **WINDOW, "max_window_layers": 3}, is_loose=True),
    "qwen3-moe": Variant("Qwen3Moe", {**QWEN3_MOE, **rope(theta=1e6), "norm_topk_prob": True}, is_loose=True),
    "qwen3-moe-not-normed": Variant(
        "Qwen3Moe", {**QWEN3_MOE, "attention_bias": True, "tie_word_embeddings": True, **YARN}, is_loose=True
    ),
    "qwen3-moe-sparse-step": Variant(
        "Qwen3Moe",
        {**QWEN3_MOE, "decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [3]},
        is_loose=True,
    ),
    "qwen3-moe-window": Variant(
        "Qwen3Moe", {**QWEN3_MOE, "use_sliding_window": True, "sliding_window": 21}, is_loose=True
    ),
}
