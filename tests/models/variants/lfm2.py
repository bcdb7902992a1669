"""LFM2, with experts too, LFM3, LFM2-VL and LFM3-VL: gated short convolutions in most layers."""

from __future__ import annotations

import torch
from torch import nn

from tests.models.variants.variant import COMMON, NO_HEAD_DIM, Variant, rope

SIZES = {
    **NO_HEAD_DIM, "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"],
    **rope(theta=1e6), "norm_eps": 2e-3,
}  # fmt: skip
LFM3 = {
    "num_hidden_layers": 4, "norm_eps": 2e-3, "sliding_window": 24,
    "layer_types": ["conv", "full_attention", "sliding_attention", "conv"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    },
}  # fmt: skip
MOE = {
    "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_dense_layers": 1,
    "routed_scaling_factor": 1.7,
}  # fmt: skip
# The text part of LFM2-VL.
TEXT = {**{name: value for name, value in {**COMMON, **SIZES}.items() if value is not None}, "model_type": "lfm2"}
VISION = {
    "hidden_size": 60, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 6, "num_patches": 25,
    "patch_size": 4, "model_type": "siglip2_vision_model", "vision_use_head": False, "layer_norm_eps": 1e-3,
}  # fmt: skip
# The text part of LFM3-VL.
TEXT3 = {**{name: value for name, value in {**COMMON, **LFM3}.items() if value is not None}, "model_type": "lfm3"}
VISION3 = {
    "hidden_size": 96, "intermediate_size": 56, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "patch_size": 4, "norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 300.0},
}  # fmt: skip


def with_biases(model: nn.Module) -> None:
    """Give experts biases that change choices, and make routers less steep."""
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("expert_bias"):
                parameter.uniform_(-0.3, 0.3)


VARIANTS = {
    "lfm2": Variant("Lfm2", {**SIZES, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.3}),
    "lfm2-bias-untied": Variant(
        "Lfm2", {**SIZES, "conv_bias": True, "conv_L_cache": 5, "block_auto_adjust_ff_dim": False,
                 "tie_word_embeddings": False},
    ),
    "lfm3": Variant("Lfm3", {**LFM3, "conv_L_cache": 5}),
    "lfm3-no-gate-bias": Variant(
        "Lfm3",
        {
            **LFM3, "use_attention_gate": False, "attention_bias": True, "conv_bias": True,
            "layer_types": ["full_attention", "conv", "sliding_attention", "full_attention"],
        },
    ),
    "lfm2-moe": Variant("Lfm2Moe", {**SIZES, **MOE}, is_loose=True, patch=with_biases),
    "lfm2-moe-no-bias": Variant(
        "Lfm2Moe",
        {**SIZES, **MOE, "use_expert_bias": False, "norm_topk_prob": False, "num_dense_layers": 0},
        is_loose=True,
    ),
    "lfm2-vl": Variant(
        "Lfm2Vl",
        {**dict.fromkeys(COMMON), "text_config": TEXT, "vision_config": VISION, "image_token_id": 190,
         "projector_hidden_size": 44},
    ),
    "lfm2-vl-plain": Variant(
        "Lfm2Vl",
        {**dict.fromkeys(COMMON), "text_config": TEXT, "vision_config": {**VISION, "hidden_act": "gelu"},
         "image_token_id": 190, "projector_hidden_size": 52, "projector_use_layernorm": False,
         "projector_bias": False, "projector_hidden_act": "silu", "downsample_factor": 3},
    ),
    "lfm3-vl": Variant(
        "Lfm3Vl",
        {**dict.fromkeys(COMMON), "text_config": TEXT3, "vision_config": VISION3, "image_token_id": 190,
         "projector_hidden_size": 44},
    ),
    "lfm3-vl-wide": Variant(
        "Lfm3Vl",
        {**dict.fromkeys(COMMON), "text_config": {**TEXT3, "use_attention_gate": False},
         "vision_config": {**VISION3, "conv_kernel_size": 5, "num_key_value_heads": 3, "spatial_merge_size": 3,
                           "temporal_patch_size": 1,
                           "layer_types": ["full_attention", "conv", "full_attention", "conv"]},
         "image_token_id": 190, "projector_hidden_size": 52, "projector_bias": False, "projector_hidden_act": "silu",
         "tie_word_embeddings": False},
    ),
}  # fmt: skip
