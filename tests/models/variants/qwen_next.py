"""Qwen3-Next, Qwen3.5, Qwen3.5-MoE, MiniCPM-V 4.6 and 4.7: linear attention in most layers; experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.models.variants.qwen import vision
from tests.models.variants.variant import COMMON, Variant, rope

LINEAR = {
    "linear_num_key_heads": 6, "linear_num_value_heads": 12, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "num_hidden_layers": 4,
    # The norm after a state makes small products large, and their rounding errors.
    "rms_norm_eps": 5e-2,
}  # fmt: skip
MOE = {
    "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
}  # fmt: skip
PARTIAL: dict[str, Any] = rope(theta=1e6, partial_rotary_factor=0.25)


def steady(model: nn.Module) -> None:
    """Let states decay as trained ones do, and make routers less steep: both would make rounding errors grow."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(0.5, 2.0)
            elif name.endswith("mlp.gate.weight"):
                parameter.mul_(0.25)


def variant(config: str, entries: dict[str, Any], *, is_loose: bool = False) -> Variant:
    """transformers computes prompts in chunks, with other rounding errors than token by token."""
    return Variant(config, {**LINEAR, **PARTIAL, **entries}, is_loose=is_loose, one_by_one=True, patch=steady)


def multimodal(config: str, text: dict[str, Any]) -> Variant:
    """The text part of a file with images, half of whose heads is rotated, as vision() cannot do with a quarter."""
    given = {**LINEAR, **text, "partial_rotary_factor": 1.0}
    entries = vision(given, [4, 2, 2], tie_word_embeddings=False)
    return Variant(config, entries, is_loose=True, one_by_one=True, patch=steady)


def minicpm_v(config: str, entries: dict[str, Any], of_text: dict[str, Any] = PARTIAL) -> Variant:
    text = {name: value for name, value in {**COMMON, **LINEAR, **of_text}.items() if value is not None}
    vision = {
        "hidden_size": 60, "intermediate_size": 56, "num_hidden_layers": 4, "num_attention_heads": 6, "patch_size": 4,
        "image_size": 30, "layer_norm_eps": 1e-3,
    }  # fmt: skip
    given = {"text_config": {**text, "model_type": "qwen3_5_text"}, "vision_config": vision, "image_token_id": 190}
    entries = {**dict.fromkeys(COMMON), **given, "insert_layer_id": 1, **entries}
    return Variant(config, entries, one_by_one=True, patch=steady)


MIXED = {
    "mlp_only_layers": [1], "norm_topk_prob": False, "linear_conv_kernel_dim": 2,
    "layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
VARIANTS = {
    "qwen3-next": variant("Qwen3Next", MOE, is_loose=True),
    "qwen3-next-dense-layers": variant("Qwen3Next", {**MOE, **MIXED}, is_loose=True),
    "qwen3.5": variant("Qwen3_5Text", {"linear_num_key_heads": 12, "attention_bias": True}),
    "qwen3.5-tied": variant("Qwen3_5Text", {"tie_word_embeddings": True}),
    "qwen3.5-moe": variant("Qwen3_5MoeText", MOE, is_loose=True),
    "qwen3.5-multimodal": multimodal("Qwen3_5", {}),
    "qwen3.5-moe-multimodal": multimodal("Qwen3_5Moe", MOE),
    "minicpm-v-4.6": minicpm_v("MiniCPMV4_6", {}),
    "minicpm-v-4.7": minicpm_v(
        "MiniCPMV4_7",
        {"image_start_id": 180, "image_end_id": 181, "slice_start_id": 182, "slice_end_id": 183, "newline_id": 184},
        {
            **rope(theta=1e4, partial_rotary_factor=1.0, mrope_section=[4, 2, 2], mrope_interleaved=True),
            "layer_types": MIXED["layer_types"],
        },
    ),
    "minicpm-v-4.6-4x": minicpm_v("MiniCPMV4_6", {"downsample_mode": "4x", "tie_word_embeddings": True}),
}
