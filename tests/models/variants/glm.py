"""GLM-4-9B-chat-hf, GLM-4 0414 (with two norms more), GLM-4.5, its Air, GLM-4.7-Flash (latent), GLM-4.1V to 4.6V."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.models.variants.deepseek import EXPERTS, GROUPS, LATENT
from tests.models.variants.variant import COMMON, Variant, rope

HALF = rope(partial_rotary_factor=0.5)
MOE = {**EXPERTS, "n_shared_experts": 1, "rms_norm_eps": 1e-4}
TEXT = {**COMMON, "hidden_size": 96, "head_dim": None, "model_type": "glm4v_text"}
VISION = {
    "hidden_size": 48, "intermediate_size": 52, "out_hidden_size": 96, "depth": 3, "num_heads": 6, "image_size": 20,
    "patch_size": 4, "rms_norm_eps": 1e-3,
}  # fmt: skip


def seeing(text: dict[str, Any], **vision: Any) -> dict[str, Any]:
    """A model that also sees images."""
    text_config = {name: value for name, value in {**TEXT, **text}.items() if value is not None}
    return {
        **dict.fromkeys(COMMON), "text_config": text_config, "vision_config": {**VISION, **vision},
        "image_token_id": 190, "video_token_id": 191, "image_start_token_id": 188, "image_end_token_id": 189,
    }  # fmt: skip


def with_gentle_encoder(model: nn.Module) -> None:
    """Make scores and rows of the encoder smaller, which otherwise amplify what float32 rounds."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "visual" in name and name.endswith(("attn.qkv.weight", "merger.proj.weight", "merger.down_proj.weight")):
                parameter.mul_(0.5)


VARIANTS = {
    "glm-4-9b-chat": Variant("Glm", {**HALF, "rms_norm_eps": 1e-3, "attention_bias": True}),
    "glm-no-bias-tied": Variant(
        "Glm", {**rope(theta=5e4, partial_rotary_factor=0.25), "attention_bias": False, "tie_word_embeddings": True}
    ),
    "glm-4-0414": Variant("Glm4", {**HALF, "rms_norm_eps": 1e-3, "attention_bias": False}),
    "glm-4-0414-bias": Variant("Glm4", {**rope(partial_rotary_factor=0.75), "num_key_value_heads": 1}),
    "glm-4.1v": Variant(
        "Glm4v", seeing(rope(partial_rotary_factor=0.5, mrope_section=[1, 1, 2])), patch=with_gentle_encoder
    ),
    "glm-4.6v": Variant(
        "Glm46V",
        seeing(
            {**rope(theta=5e5, mrope_section=[2, 3, 3]), "rms_norm_eps": 1e-3, "num_key_value_heads": 3},
            model_type="glm4v_vision", attention_bias=True, spatial_merge_size=3, temporal_patch_size=1,
        ),
        patch=with_gentle_encoder,
    ),
    "glm-ocr": Variant(
        "GlmOcr",
        seeing(
            {**rope(theta=2e4, mrope_section=[3, 4, 5]), "head_dim": 24, "model_type": "glm_ocr_text"},
            intermediate_size=60,
        ),
        patch=with_gentle_encoder,
    ),
    "glm-ocr-no-bias": Variant(
        "GlmOcr",
        seeing(
            {
                **rope(partial_rotary_factor=0.5, mrope_section=[1, 1, 2]), "num_key_value_heads": 3,
                "model_type": "glm_ocr_text",
            },
            attention_bias=False, spatial_merge_size=3, temporal_patch_size=1,
        ),
        patch=with_gentle_encoder,
    ),
    "glm-4.5v": Variant(
        "Glm4vMoe",
        seeing(
            {
                **MOE, **rope(theta=7e4, partial_rotary_factor=0.5, mrope_section=[1, 2, 3]), "head_dim": 24,
                "model_type": "glm4v_moe_text",
            }
        ),
        is_loose=True, patch=with_gentle_encoder,
    ),
    "glm-4.5v-groups": Variant(
        "Glm4vMoe",
        seeing(
            {
                **MOE, **GROUPS, **rope(partial_rotary_factor=0.25, mrope_section=[2, 1, 1]), "norm_topk_prob": False,
                "attention_bias": False, "n_shared_experts": 2, "routed_scaling_factor": 1.3, "head_dim": 32,
                "model_type": "glm4v_moe_text", "num_key_value_heads": 3,
            },
            attention_bias=True,
        ),
        is_loose=True, patch=with_gentle_encoder,
    ),
    "glm-4.5": Variant(
        "Glm4Moe", {**MOE, **rope(theta=1e6, partial_rotary_factor=0.5), "attention_bias": True, "use_qk_norm": True},
        is_loose=True,
    ),
    "glm-4.5-air": Variant(
        "Glm4Moe",
        {**MOE, **GROUPS, **HALF, "norm_topk_prob": False, "num_key_value_heads": 3, "n_shared_experts": 2},
        is_loose=True,
    ),
    "glm-4.7-flash": Variant(
        "Glm4MoeLite", {**LATENT, **MOE, **rope(theta=1e6), "first_k_dense_replace": None}, is_loose=True
    ),
    "glm-4-moe-lite-groups": Variant(
        "Glm4MoeLite",
        {
            **LATENT, **MOE, **GROUPS, "first_k_dense_replace": None, "rope_interleave": False, "attention_bias": True,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
        nulls=("q_lora_rank",), is_loose=True,
    ),
}  # fmt: skip
